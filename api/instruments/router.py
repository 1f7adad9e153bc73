"""Routes for instruments: looking them up, who lists them, and changed lots."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.container import Call
from api.http import errors, problems
from api.http.fields import Rows
from api.instruments.schemas import (
    NAME_PATTERN,
    ApproveChangeRequest,
    InstrumentChangeList,
    InstrumentChangeView,
    InstrumentPageView,
    InstrumentSourceList,
    InstrumentSourceRequest,
    InstrumentSourceView,
    InstrumentView,
    LoadInstrumentsRequest,
    LoadsBegunView,
)
from infra.database.trading import instrument_loads, instruments
from infra.database.trading.instrument_loads import (
    InstrumentChangeNotFound,
    InstrumentSourceMissing,
    InstrumentSourceTrades,
)
from infra.database.trading.instruments import InstrumentNotFound, InstrumentSearch
from worker_runtime.protocol.installed_brokers import paper_exchange
from worker_runtime.protocol.instruments import InstrumentKind

router = APIRouter(tags=["instruments"])

#: A code: no control characters.
_CODE = r"^[^\x00-\x1f\x7f-\x9f]*$"
Broker = Annotated[
    str, Path(pattern=NAME_PATTERN, description="Name of a broker.", examples=[paper_exchange()])
]
Code = Annotated[
    str, Path(pattern=_CODE, max_length=32, description="Code.", examples=["TXO20000A6"])
]
Number = Annotated[int, Path(ge=1, le=2**63 - 1)]


@router.get("/instruments", summary="Search instruments")
async def search_instruments(
    call: Call,
    broker: Annotated[
        str | None,
        Query(
            pattern=NAME_PATTERN, description="Only of this broker.", examples=[paper_exchange()]
        ),
    ] = None,
    query: Annotated[
        str,
        Query(
            pattern=_CODE,
            max_length=120,
            description="The beginning of a code or a part of a name, in any case.",
            examples=["TXO2"],
        ),
    ] = "",
    market: Annotated[
        str | None,
        Query(pattern=NAME_PATTERN, description="Only of this market.", examples=["futures"]),
    ] = None,
    kind: Annotated[InstrumentKind | None, Query(description="Only of this kind.")] = None,
    after: Annotated[
        str,
        Query(pattern=_CODE, max_length=64, description="`next_cursor` of the page before."),
    ] = "",
    limit: Rows = 100,
) -> InstrumentPageView:
    """Sorts by broker and code.

    A broker whose list was never loaded has none here: its record says what symbols mean.
    """
    broker_before, _, code_before = after.partition("/")
    search = InstrumentSearch(
        broker=broker or "",
        text=query,
        market=market or "",
        kind=kind or "",
        after=(broker_before, code_before),
        limit=limit + 1,
    )
    rows = await call.database.fetch(instruments.search_instruments, search)
    shown = rows[:limit]
    cursor = f"{shown[-1].broker}/{shown[-1].code}" if len(rows) > limit else None
    return InstrumentPageView(
        instruments=[InstrumentView.model_validate(row) for row in shown], next_cursor=cursor
    )


@router.get("/instruments/sources", summary="List the accounts that list instruments")
async def list_sources(call: Call) -> InstrumentSourceList:
    """Names, for each broker and market, the account through which its instruments are loaded, how
    old the list is, and how the last load ended. Operators only."""
    return InstrumentSourceList(sources=await call.services.instrument_lists.sources())


@router.put(
    "/instruments/sources/{broker}",
    summary="Set the account that lists a broker's instruments",
    responses=problems.responses(InstrumentSourceMissing, InstrumentSourceTrades),
)
async def put_source(
    broker: Broker, body: InstrumentSourceRequest, call: Call
) -> InstrumentSourceView:
    """Loads the broker's instruments through this account each trading day.

    Each market may have an account: this one replaces the one of its own market. Its user must not
    trade, because the worker serves the whole installation: no orders, no webhook, and no API key
    with the scope `trade`. Each load checks this again. Operators only.
    """
    source = await call.database.write(
        instrument_loads.set_source, broker, body.user_id, body.account_id, actor=call.actor
    )
    views = await call.services.instrument_lists.sources()
    return next(view for view in views if (view.broker, view.market) == (broker, source.market))


@router.delete(
    "/instruments/sources/{broker}",
    status_code=204,
    summary="Stop loading a broker's instruments",
    responses=problems.responses(InstrumentSourceMissing),
)
async def delete_source(
    broker: Broker,
    call: Call,
    market: Annotated[
        str | None,
        Query(
            pattern=NAME_PATTERN,
            description="Only the account of this market.",
            examples=["futures"],
        ),
    ] = None,
) -> Response:
    """Keeps the list in force. Operators only."""
    await call.database.write(
        instrument_loads.delete_source, broker, market or "", actor=call.actor
    )
    return Response(status_code=204)


@router.post(
    "/instruments/sources/{broker}/load",
    status_code=202,
    summary="Load a broker's instruments now",
    responses=problems.responses(
        InstrumentSourceMissing, InstrumentSourceTrades, errors.TemporalUnavailable
    ),
)
async def load_instruments(
    broker: Broker, body: LoadInstrumentsRequest, call: Call
) -> LoadsBegunView:
    """Begins a load of today's list through the account of each market, or has a waiting load make
    its next attempt at once. A load that fails is tried again for four hours. Operators only."""
    lists = call.services.instrument_lists
    # What is refused is not noted.
    day, markets = await lists.require_markets(broker, body.market or "")
    await call.audit(
        "instruments.load_requested",
        f"broker:{broker}",
        accept_smaller=body.accept_smaller,
        markets=markets,
    )
    return await lists.begin_loads(broker, day, markets, accept_smaller=body.accept_smaller)


@router.get("/instruments/changes", summary="List changed lots")
async def list_changes(call: Call, limit: Rows = 100) -> InstrumentChangeList:
    """Shows lots that a broker has changed and no operator has approved yet, the oldest first.
    Until then orders are checked with the old lots. Operators only."""
    rows = await call.database.fetch(instrument_loads.open_changes, limit=limit)
    return InstrumentChangeList(changes=[InstrumentChangeView.model_validate(row) for row in rows])


@router.post(
    "/instruments/changes/{number}/approve",
    summary="Approve a changed lot",
    responses=problems.responses(InstrumentChangeNotFound),
)
async def approve_change(
    number: Number, body: ApproveChangeRequest, call: Call
) -> InstrumentChangeView:
    """Uses the new lot within 30 s.

    Make sure at the broker first: a wrong lot makes
    orders too large by the same factor. Operators only.
    """
    row = await call.database.write(
        instrument_loads.approve_change, number, actor=call.actor, reason=body.reason
    )
    return InstrumentChangeView.model_validate(row)


@router.get(
    "/instruments/{broker}/{code}",
    summary="Get an instrument",
    responses=problems.responses(InstrumentNotFound),
)
async def get_instrument(broker: Broker, code: Code, call: Call) -> InstrumentView:
    """Finds an instrument that its broker no longer lists, too. Its lot is the one in force."""
    row = await call.database.fetch(instruments.find_row, broker, code)
    if row is None:
        raise InstrumentNotFound(f"{broker} lists no instrument {code}.")
    return InstrumentView.model_validate(row)

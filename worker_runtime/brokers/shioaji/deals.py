"""Merges the deals of one order from events and lists:
each counts once, and none is dropped for another.

Events name a deal by `exchange_seq`, lists by `seq`, and it is not documented that these agree.
Once an id was seen in both sources they do, and each id is a deal. Until then a deal of one source
and one of the other with the same price, quantity and second are taken for the same; two of one
source never are.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from worker_runtime.protocol.messages import Fill


@dataclass(slots=True)
class _Deal:
    #: As it was reported first: its id stays.
    fill: Fill
    #: Ids under which the sources name it; "": that source has not named it.
    event_id: str = ""
    listed_id: str = ""


class DealIds:
    """Holds what is known of the sources' ids, for all orders of an account."""

    agree = False


class OrderDeals:
    """The deals of one order."""

    def __init__(self, ids: DealIds) -> None:
        self._ids = ids
        self._deals: list[_Deal] = []

    @property
    def fills(self) -> list[Fill]:
        self._split()
        return [deal.fill for deal in self._deals]

    def add_event(self, fill: Fill) -> bool:
        """Adds a deal of an event; returns True if it is one that nobody has named before."""
        for deal in self._deals:
            if fill.fill_id == deal.event_id:
                return False
            if fill.fill_id == deal.listed_id:
                self._ids.agree = True
                if not deal.event_id:
                    deal.event_id = fill.fill_id
                    return False
        twin = self._find_twin(fill, [deal for deal in self._deals if not deal.event_id])
        if twin is not None:
            twin.event_id = fill.fill_id
            return False
        self._deals.append(_Deal(fill, event_id=fill.fill_id))
        return True

    def add_listed(self, fills: Iterable[Fill]) -> None:
        """Adds the deals of a list. Those whose ids are known come first,
        so that no other takes their place."""
        unknown = []
        for fill in fills:
            if any(fill.fill_id == deal.listed_id for deal in self._deals):
                continue
            if not any(fill.fill_id == deal.event_id for deal in self._deals):
                unknown.append(fill)
                continue
            self._ids.agree = True
            self._split()
            for deal in self._deals:
                if deal.event_id == fill.fill_id:
                    deal.listed_id = fill.fill_id
        for fill in unknown:
            twin = self._find_twin(fill, [deal for deal in self._deals if not deal.listed_id])
            if twin is not None:
                twin.listed_id = fill.fill_id
            else:
                self._deals.append(_Deal(fill, listed_id=fill.fill_id))

    def _find_twin(self, fill: Fill, others: Iterable[_Deal]) -> _Deal | None:
        """Returns the same deal under the other source's id."""
        if self._ids.agree:
            return None
        same = fill.price, fill.quantity, fill.at_ms // 1000
        return next(
            (
                deal
                for deal in others
                if (deal.fill.price, deal.fill.quantity, deal.fill.at_ms // 1000) == same
            ),
            None,
        )

    def _split(self) -> None:
        """Takes apart what was taken for one deal before it was known that the ids agree."""
        if not self._ids.agree:
            return
        for deal in list(self._deals):
            if deal.event_id and deal.listed_id and deal.event_id != deal.listed_id:
                other = deal.listed_id if deal.fill.fill_id == deal.event_id else deal.event_id
                fill = Fill(
                    fill_id=other,
                    quantity=deal.fill.quantity,
                    price=deal.fill.price,
                    at_ms=deal.fill.at_ms,
                )
                if other == deal.listed_id:
                    deal.listed_id = ""
                    self._deals.append(_Deal(fill, listed_id=other))
                else:
                    deal.event_id = ""
                    self._deals.append(_Deal(fill, event_id=other))

"""Yields every step that the model may take next. A step has a name, for the story of a
counterexample."""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.model.state import (
    LOST_WAIT,
    MARGIN,
    OLD_ORDER,
    STOLEN_ORDER,
    TTL,
    TWO_SESSIONS,
    ModelWorker,
    Rules,
    Violation,
    World,
)

#: A step: its name, and the world after it or the property that it broke.
Step = tuple[str, World | Violation]


def first(rules: Rules) -> World:
    return World(
        workers=(ModelWorker(),) * rules.epochs,
        queue=rules.orders,
        flushes=rules.flushes,
        terminations=rules.terminations,
        late_claims=rules.late_claims,
    )


def steps(world: World, rules: Rules) -> Iterator[Step]:
    """Yields all steps that may follow."""
    yield from _orchestrator(world, rules)
    yield from _valkey(world, rules)
    for index, worker in enumerate(world.workers):
        yield from _network(world, rules, index, worker)
        if worker.alive:
            yield from _supervisor(world, rules, index, worker)
            yield from _session(world, rules, index, worker)
            yield from _freezes(world, rules, index, worker)
    if not any(_urgent(worker, rules) for worker in world.workers):
        yield "a tick passes", _tick(world)


def _with(world: World, index: int, worker: ModelWorker) -> World:
    workers = world.workers
    return world._replace(workers=(*workers[:index], worker, *workers[index + 1 :]))


# --- time -----------------------------------------------------------------------------------------


def _tick(world: World) -> World:
    workers = tuple(
        worker._replace(
            lease=max(0, worker.lease - 1), age=min(TTL, worker.age + 1) if worker.renewal else 0
        )
        if worker.alive
        else worker
        for worker in world.workers
    )
    waited = min(LOST_WAIT, world.waited + 1) if world.phase == "waiting" else 0
    mark, kept = max(0, world.mark - 1), min(TTL, world.kept + 1)
    return world._replace(workers=workers, waited=waited, mark=mark, kept=kept)


def _urgent(worker: ModelWorker, rules: Rules) -> bool:
    """Returns True if something has to happen before time passes: the margin is long enough for
    it."""
    if not (worker.alive and rules.check_lease and worker.lease <= MARGIN):
        return False
    if not worker.session_frozen and (worker.logged_in or worker.doing == "checked"):
        return True
    return worker.logged_in and not worker.supervisor_frozen


# --- the orchestrators ----------------------------------------------------------------------------


def _orchestrator(world: World, rules: Rules) -> Iterator[Step]:
    epoch = world.epoch
    if world.phase == "free" and epoch < rules.epochs:
        yield f"worker {epoch + 1} is claimed", _claimed(world, rules)
    yield from _unknown(world, rules)
    if world.phase == "serving":
        # For any reason: a missing mark, an event, an idle user, a suspicion that is wrong.
        yield f"worker {epoch} shall end", world._replace(phase="stopping")
        worker = world.workers[epoch - 1]
        if world.owner == 0:
            yield f"the owner key of {epoch} is restored", world._replace(owner=epoch)
        if worker.alive and not worker.credentials:
            reloaded = worker._replace(credentials=True)
            yield f"worker {epoch} gets its credentials again", _with(world, epoch - 1, reloaded)
    if world.phase == "stopping":
        yield from _stop(world, rules)
    if world.phase == "waiting" and world.waited >= LOST_WAIT:
        yield f"worker {epoch} counts as gone with its host", world._replace(phase="free", waited=0)
    kept = world.kept >= TTL or not rules.check_kept
    if rules.mark_proves and world.phase == "waiting" and not world.mark and kept:
        yield f"the mark of {epoch} has run out", world._replace(phase="free", waited=0)
    if world.late_own and (world.owner == 0 or world.owner <= world.late_own):
        yield (
            f"the other orchestrator repeats set_owner.lua of {world.late_own}",
            world._replace(owner=world.late_own, late_own=0),
        )


def _claimed(world: World, rules: Rules, phase: str = "serving") -> World:
    """Makes the next assignment, its owner key, and a worker that gets the credentials."""
    epoch = world.epoch + 1
    late = epoch if rules.late_own else 0
    claimed = world._replace(
        epoch=epoch, phase=phase, owner=max(world.owner, epoch), late_own=late, mark=0
    )
    return _with(claimed, epoch - 1, ModelWorker(alive=True, credentials=True))


def _unknown(world: World, rules: Rules) -> Iterator[Step]:
    """Yields what happens to workers that no workflow knows: a run was terminated, or a claim came
    late."""
    epoch = world.epoch
    if world.terminations and world.phase in ("serving", "stopping", "waiting"):
        orphaned = world._replace(phase="unknown", waited=0, terminations=world.terminations - 1)
        yield f"the workflow of worker {epoch} is terminated", orphaned
    has_worker = world.phase != "free"
    if world.phase == "unknown" and rules.check_unended:
        yield f"the next run learns of worker {epoch}", world._replace(phase="stopping")
    elif world.phase == "unknown" and epoch < rules.epochs:
        yield f"worker {epoch + 1} is claimed", _claimed(world, rules)
    if world.late_claims and epoch < rules.epochs and not (has_worker and rules.check_unended):
        late = world._replace(late_claims=world.late_claims - 1)
        yield f"a late call claims worker {epoch + 1}", _claimed(late, rules, "unknown")


def _stop(world: World, rules: Rules) -> Iterator[Step]:
    index = world.epoch - 1
    worker = world.workers[index]
    if not rules.confirm_stop:
        yield f"nobody waits for the end of worker {world.epoch}", world._replace(phase="free")
    elif not worker.lost:
        stopped = _with(world, index, _ended(worker, rules))._replace(phase="free")
        yield f"the end of worker {world.epoch} is confirmed", stopped
    else:  # the launcher's word
        owner = world.epoch + 1 if rules.fence_before_wait else world.owner
        waiting = world._replace(phase="waiting", waited=0, owner=owner)
        yield f"the host of worker {world.epoch} counts as lost", waiting


def _ended(worker: ModelWorker, rules: Rules) -> ModelWorker:
    """Ends all processes of a worker; what they had sent may still arrive."""
    return ModelWorker(
        renewal="sent" if worker.renewal == "sent" else "",
        late_pop=worker.late_pop or worker.doing == "popping",
        late_order=worker.late_order or (not rules.wire_keeps_order and worker.doing == "checked"),
    )


def _session_ended(worker: ModelWorker, rules: Rules) -> ModelWorker:
    """Starts a fresh session in the same worker: no credentials, no broker session, the same
    lease."""
    return _ended(worker, rules)._replace(
        alive=True,
        lost=worker.lost,
        supervisor_frozen=worker.supervisor_frozen,
        sessions=worker.sessions + 1,
        lease=worker.lease,
        fenced=worker.fenced,
        renewal=worker.renewal,
        age=worker.age,
    )


def _valkey(world: World, rules: Rules) -> Iterator[Step]:
    if world.flushes:
        # What was queued is settled by the API; the model continues with the same number of orders.
        kept = 0 if rules.mark_proves else world.kept
        yield (
            "Valkey loses everything",
            world._replace(owner=0, flushes=world.flushes - 1, mark=0, kept=kept),
        )


# --- a worker -------------------------------------------------------------------------------------


def _freezes(world: World, rules: Rules, index: int, worker: ModelWorker) -> Iterator[Step]:
    epoch = index + 1
    if rules.freezes:
        if worker.session_frozen:
            yield (
                f"session {epoch} runs again",
                _with(world, index, worker._replace(session_frozen=False)),
            )
        else:
            yield (
                f"session {epoch} is stopped",
                _with(world, index, worker._replace(session_frozen=True)),
            )
        turned = not worker.supervisor_frozen
        name = "is stopped" if turned else "runs again"
        yield (
            f"supervisor {epoch} {name}",
            _with(world, index, worker._replace(supervisor_frozen=turned)),
        )
    if rules.host_lost and not worker.lost:
        yield (
            f"the launcher loses the host of {epoch}",
            _with(world, index, worker._replace(lost=True)),
        )


def _supervisor(world: World, rules: Rules, index: int, worker: ModelWorker) -> Iterator[Step]:
    if worker.supervisor_frozen:
        return
    epoch = index + 1
    if not worker.renewal and not worker.fenced:
        yield (
            f"{epoch} sends a renewal",
            _with(world, index, worker._replace(renewal="sent", age=0)),
        )
    if worker.renewal == "reply":
        lease_left = TTL - worker.age if rules.lease_from_send else TTL
        renewed = worker._replace(lease=max(worker.lease, lease_left), renewal="", age=0)
        yield f"{epoch} hears that its mark is renewed", _with(world, index, renewed)
    overdue = rules.check_lease and worker.lease <= MARGIN and worker.logged_in
    if (overdue or worker.session_frozen or worker.fenced) and worker.sessions < rules.replacements:
        fresh = _session_ended(worker, rules)
        yield f"session {epoch} is replaced in place", _with(world, index, fresh)
    elif overdue or worker.session_frozen or worker.fenced:
        yield f"worker {epoch} ends by itself", _with(world, index, _ended(worker, rules))


def _session(world: World, rules: Rules, index: int, worker: ModelWorker) -> Iterator[Step]:
    if worker.session_frozen:
        return
    epoch = index + 1
    usable = not worker.fenced and (worker.lease > MARGIN or not rules.check_lease)
    if worker.logged_in and not usable:
        away = worker._replace(
            logged_in=False, doing="idle" if worker.doing == "checked" else worker.doing
        )
        yield f"{epoch} logs out: no usable lease", _with(world, index, away)
    if not worker.logged_in and worker.credentials and usable and worker.doing == "idle":
        yield f"{epoch} logs in", _login(world, rules, index, worker)
    if worker.logged_in and usable and worker.doing == "idle" and world.queue:
        yield f"{epoch} sends a pop", _with(world, index, worker._replace(doing="popping"))
    if worker.doing == "popped":
        after = "checked" if usable and worker.logged_in else "idle"
        yield (
            f"{epoch} checks its lease: {after}",
            _with(world, index, worker._replace(doing=after)),
        )
    if worker.doing == "checked":
        yield f"{epoch} calls the broker", _arrive(world, index, worker._replace(doing="idle"))


def _login(world: World, rules: Rules, index: int, worker: ModelWorker) -> World | Violation:
    others = (other for i, other in enumerate(world.workers) if i != index)
    if any(other.logged_in for other in others) and TWO_SESSIONS not in rules.overlooked:
        return TWO_SESSIONS
    newest = max(world.newest_login, index + 1)
    return _with(world, index, worker._replace(logged_in=True))._replace(newest_login=newest)


def _arrive(world: World, index: int, worker: ModelWorker) -> World | Violation:
    return OLD_ORDER if world.newest_login > index + 1 else _with(world, index, worker)


# --- messages on their way ------------------------------------------------------------------------


def _network(world: World, rules: Rules, index: int, worker: ModelWorker) -> Iterator[Step]:
    """Yields the arrival of each message: at any time, also after its sender's end, or never."""
    epoch = index + 1
    if worker.renewal:
        lost = worker._replace(renewal="", age=0)
        yield f"a renewal of {epoch} is lost", _with(world, index, lost)
    if worker.renewal == "sent" and world.owner:
        if world.owner == epoch or not rules.check_epoch_in_mark:
            renewed = worker._replace(renewal="reply") if worker.alive else lost
            mark = TTL if rules.mark_proves and epoch == world.epoch else world.mark
            yield (
                f"Valkey renews the mark of {epoch}",
                _with(world, index, renewed)._replace(mark=mark),
            )
        else:
            yield f"Valkey fences {epoch}", _with(world, index, lost._replace(fenced=worker.alive))
    if worker.doing == "popping":
        yield from _pop(
            world, rules, index, worker._replace(doing="popped"), worker._replace(doing="idle")
        )
    if worker.late_pop:
        gone = worker._replace(late_pop=False)
        yield from _pop(world, rules, index, gone, gone)
    if worker.late_order:
        late = _arrive(world, index, worker._replace(late_order=False))
        yield f"an order that the ended process of {epoch} had sent arrives", late


def _pop(
    world: World, rules: Rules, index: int, taken: ModelWorker, refused: ModelWorker
) -> Iterator[Step]:
    """Pops an item, as `pop.lua` does. Nobody reads the reply to an ended session; the item is
    settled as unknown."""
    epoch = index + 1
    if world.owner == epoch or not rules.check_epoch_in_pop:
        if not world.queue:
            yield f"Valkey has nothing for {epoch}", _with(world, index, refused)
        elif world.epoch != epoch and world.newest_login > epoch:
            yield f"Valkey gives {epoch} an order", STOLEN_ORDER
        else:
            yield (
                f"Valkey gives {epoch} an order",
                _with(world, index, taken)._replace(queue=world.queue - 1),
            )
    else:
        yield f"Valkey refuses the pop of {epoch}", _with(world, index, refused)

"""The job queue as plain Python: what the scripts have to do, said a second time."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CRASHES = 3


@dataclass
class ModelJob:
    """One job and where it is."""

    job_id: str
    name: str
    queue: str
    idempotent: bool
    unique: str
    group: str
    score: float = 0.0
    state: str = "waiting"
    delayed: bool = False
    attempt: int = 0
    crashes: int = 0
    runner: str = ""
    #: Grows with every claim.
    turn: int = 0
    cancelled: bool = False


@dataclass
class ModelQueue:
    """All of it. Scores are read from Valkey, since they hold its clock; their order is judged
    here."""

    limits: dict[str, int]
    weights: dict[str, int]
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    halted: set[str] = field(default_factory=set)
    groups: dict[str, list[str]] = field(default_factory=dict)
    turns: int = 0

    def holder(self, unique: str) -> str | None:
        if not unique:
            return None
        same_unique = [
            j.job_id for j in self.jobs.values() if j.unique == unique and j.state != "failed"
        ]
        return same_unique[0] if same_unique else None

    def add(self, job: ModelJob) -> None:
        self.jobs[job.job_id] = job
        if job.group:
            line = self.groups.setdefault(job.group, [])
            line.append(job.job_id)
            if line[0] != job.job_id:
                job.state = "grouped"
                return
        self._place(job)

    def expected(self) -> str | None:
        """The job that the next claim has to return."""
        for queue in sorted(self.ready, key=lambda q: (self.passes.get(q, 0.0), q)):
            if queue in self.halted:
                continue
            heads = []
            for name in {j.name for j in self._waiting(queue)}:
                first = min((j for j in self._waiting(queue) if j.name == name), key=_rank)
                heads.append((first.score, name, first.job_id))
            for _, name, job_id in sorted(heads):
                if self.running(name) < self.limits.get(name, 1_000_000):
                    return job_id
        return None

    def plain(self, job_id: str) -> bool:
        """Whether it may be prefetched, and others behind it."""
        job = self.jobs[job_id]
        return job.idempotent and not (
            job.crashes or job.group or job.unique or job.name in self.limits
        )

    def claimed(self, job_id: str, runner: str) -> None:
        job = self.jobs[job_id]
        self.passes[job.queue] = self._caught_up(job.queue) + self._turn(job.queue)
        job.state, job.runner = "running", runner
        job.attempt += 1
        self.turns += 1
        job.turn = self.turns
        self._empty(job.queue)

    def given_back(self, job: ModelJob) -> str:
        if job.cancelled:
            return "cancelled"
        self.passes[job.queue] -= self._turn(job.queue)
        job.attempt -= 1
        self._place(job)
        return "returned"

    def retried(self, job: ModelJob, delayed: bool, crashed: bool) -> str:
        if job.cancelled:
            self.end(job, "cancelled")
            return "cancelled"
        job.crashes += crashed
        job.delayed = delayed
        self._place(job)
        return "retry"

    def died(self, runner: str) -> dict[str, str]:
        fates = {}
        held = [j for j in self.jobs.values() if j.state == "running" and j.runner == runner]
        # In the order of their claims, as Valkey keeps a small set: it decides which queue is ready
        # first.
        for job in sorted(held, key=lambda j: j.turn):
            job.crashes += 1
            if job.cancelled:
                self.end(job, "cancelled")
                fates[job.job_id] = "cancelled"
            elif not job.idempotent or job.crashes >= MAX_CRASHES:
                self.end(job, "failed")
                fates[job.job_id] = "failed"
            else:
                self._place(job)
                fates[job.job_id] = "returned"
        return fates

    def end(self, job: ModelJob, status: str) -> None:
        self.ended[job.job_id] = status
        if status == "failed":
            job.state = "failed"
        else:
            del self.jobs[job.job_id]
        self._empty(job.queue)
        if job.group:
            line = self.groups[job.group]
            first = line[0] == job.job_id
            line.remove(job.job_id)
            if first and line:
                self._place(self.jobs[line[0]])

    def forgotten(self, job: ModelJob) -> None:
        """A failed job that someone cancelled."""
        del self.jobs[job.job_id]

    def requeued(self, job: ModelJob) -> None:
        del self.ended[job.job_id]
        job.attempt = job.crashes = 0
        job.cancelled = job.delayed = False
        del self.jobs[job.job_id]
        self.add(job)

    def due(self, job: ModelJob) -> None:
        job.delayed = False
        if job.state == "delayed":
            self._place(job)

    def running(self, name: str) -> int:
        return sum(j.state == "running" and j.name == name for j in self.jobs.values())

    def _place(self, job: ModelJob) -> None:
        job.state = "delayed" if job.delayed else "waiting"
        if not job.delayed and job.queue not in self.ready:
            self.passes.setdefault(job.queue, 0.0)
            self.ready.add(job.queue)

    def _turn(self, queue: str) -> float:
        return 1 / self.weights.get(queue, 1)

    def _caught_up(self, queue: str) -> float:
        """Its pass before its next turn: it lags behind no other by more than that one's last
        turn."""
        passes = {q: self.passes[q] for q in self.ready}
        if max(passes.values()) - passes[queue] <= 1:
            return passes[queue]
        return max(passes[queue], *(of - self._turn(q) for q, of in passes.items()))

    def _waiting(self, queue: str) -> list[ModelJob]:
        return [j for j in self.jobs.values() if j.queue == queue and j.state == "waiting"]

    def _empty(self, queue: str) -> None:
        if not self._waiting(queue):
            self.ready.discard(queue)


def _rank(job: ModelJob) -> tuple[float, str]:
    return job.score, job.job_id

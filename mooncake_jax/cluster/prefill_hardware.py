"""The hardware of a prefill instance as its actor commands it: all its stages, each on a rank (report 3 and 5.1).

Runs on the first stage's rank. What the actor asks for goes to every stage, this rank's among them; what they report
is gathered and posted to the actor once all have spoken.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.cluster.control import (
    BlocksChecked,
    CheckBlocks,
    EnterPrompt,
    StageCopied,
    StageDone,
    StagePromoted,
    StageWritten,
)
from mooncake_jax.cluster.entrance import Entrance, Order
from mooncake_jax.cluster.gathering import Gathering
from mooncake_jax.cluster.links import Links
from mooncake_jax.cluster.prefill_stage import Command, PrefillStage, Report, stored_blocks
from mooncake_jax.sched.actions import AbandonCopy, Action, FetchBlocks, PromoteBlocks, RunPrefill, WriteBlocks
from mooncake_jax.sched.messages import (
    BlocksPromoted,
    BlocksReplicated,
    BlocksWritten,
    Message,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
)


@dataclass(frozen=True, slots=True)
class _Running:
    entered: EnterPrompt
    reused_tokens: int
    begun: float


class PrefillHardware:
    """others: the ranks of the other stages, in order. Give start() this rank's own stage, which reports to on_report,
    before the first action.
    """

    def __init__(
        self, node: str, others: Sequence[str], block_size: int, links: Links, post: Callable[[Message], None]
    ):
        self.node, self._others, self._block_size, self._links, self._post = node, others, block_size, links, post
        stages = 1 + len(others)
        self._entrance = Entrance(stages, self._on_order)
        self._checks, self._ends, self._copies = Gathering(stages), Gathering(stages), Gathering(stages)
        self._promotions, self._writes = Gathering(stages), Gathering(stages)
        self._checking: dict[int, RunPrefill] = {}
        self._running: dict[int, _Running] = {}

    def start(self, stage: PrefillStage) -> None:
        self._stage = stage
        stage.start(self._entrance.orders)

    def perform(self, action: Action) -> None:
        match action:
            case RunPrefill(dispatch) if action.reuse:
                self._checking[dispatch] = action
                self._tell(CheckBlocks(dispatch, action.blocks[: action.reuse]))
            case RunPrefill():
                self._entrance.put(EnterPrompt(action, 0))
            case FetchBlocks() | AbandonCopy() | PromoteBlocks() | WriteBlocks():
                self._tell(action)
            case _:
                raise TypeError(f"{self.node} cannot perform {type(action).__name__}")

    def _tell(self, command: Command) -> None:
        for node in self._others:
            self._links.send(node, command)
        self._stage.perform(command)

    def _on_order(self, order: Order) -> None:
        """On the engine's thread, before it follows the order itself."""
        if isinstance(order, EnterPrompt):
            dispatch, prompt_tokens = order.run.dispatch, order.run.request.prompt_tokens
            reused_tokens = min(order.reuse * self._block_size, prompt_tokens - 1)
            self._running[dispatch] = _Running(order, reused_tokens, time.monotonic())
            self._post(PrefillStarted(dispatch, self.node, reused_tokens))
        for node in self._others:
            self._links.send(node, order)

    def on_report(self, report: Report) -> None:
        """From any stage, on any thread."""
        match report:
            case BlocksChecked(dispatch, stage, sound):
                if (counts := self._checks.add(dispatch, stage, sound)) is not None:
                    self._entrance.put(EnterPrompt(self._checking.pop(dispatch), min(counts)))
            case StageDone(dispatch, stage):
                if (ends := self._ends.add(dispatch, stage, report)) is not None:
                    self._end(self._running.pop(dispatch), ends)
            case StageCopied(dispatch, stage):
                if (copied := self._copies.add(dispatch, stage, report)) is not None:
                    self._replicated(copied)
            case StagePromoted(dispatch, stage):
                if (read := self._promotions.add(dispatch, stage, report)) is not None:
                    self._post(BlocksPromoted(dispatch, self.node, _on_all([r.blocks for r in read]), _reason(read)))
            case StageWritten(number, stage):
                if (wrote := self._writes.add(number, stage, report)) is not None:
                    self._post(BlocksWritten(number, self.node, _on_all([w.keys for w in wrote]), _reason(wrote)))

    def _end(self, running: _Running, ends: list[StageDone]) -> None:
        run, reuse = running.entered.run, running.entered.reuse
        reason = _reason(ends)
        if reason is not None:
            again = any(end.damaged for end in ends)
            self._post(PrefillFailed(run.dispatch, self.node, reason, again))
            return
        self._post(
            PrefillDone(
                dispatch=run.dispatch,
                node=self.node,
                reused_tokens=running.reused_tokens,
                seconds=time.monotonic() - running.begun,
                stored=tuple(run.blocks[i] for i in stored_blocks(running.entered)),
                lost=run.blocks[reuse : run.reuse],
                top_logits=ends[-1].top_logits,
            )
        )

    def _replicated(self, copied: list[StageCopied]) -> None:
        """A block is here once all its layers are."""
        reason = _reason(copied)
        whole = () if reason is not None else min((part.blocks for part in copied), key=len)
        self._post(BlocksReplicated(copied[0].dispatch, self.node, whole, reason))

    def close(self, deadline_s: float) -> None:
        self._stage.close(deadline_s)

    # --- called on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        if isinstance(message, Report):
            self.on_report(message)
            return True
        return self._stage.on_control(source, message)

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self._stage.place(source, header)

    def on_buffers(self, source: int, header: Any, buffers: Sequence[np.ndarray]) -> None:
        self._stage.on_buffers(source, header, buffers)


def _reason(answers: Sequence[StageDone | StageCopied | StagePromoted | StageWritten]) -> str | None:
    """What went wrong in the first stage in which something did."""
    return next((answer.reason for answer in answers if answer.reason is not None), None)


def _on_all(parts: Sequence[tuple]) -> tuple:
    """What every stage has: a block is whole only then."""
    others = [set(part) for part in parts[1:]]
    return tuple(item for item in parts[0] if all(item in other for other in others))

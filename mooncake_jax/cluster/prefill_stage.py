"""One stage of a prefill instance on its rank: engine, both tiers of its block store, and the ways of its layers'
KVCache (report 3, steps 1 to 3).

Does what the instance's first stage says, its own rank's or another one's, and reports to it. Exports and copies go on
beside the engine. Whatever fails ends the request at hand; only an engine that cannot go on ends an instance of several
stages, since they compute together.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from mooncake_jax.cache.messenger import PeerLost
from mooncake_jax.cache.slots import NotWhole
from mooncake_jax.cache.ssd import SSDStore
from mooncake_jax.cache.store import BlockStore
from mooncake_jax.cluster.control import (
    BlocksChecked,
    BlocksLayer,
    CheckBlocks,
    CopyFailed,
    EnterPrompt,
    ForgetBlocks,
    KVCacheSent,
    SendBlocks,
    StageBroken,
    StageCopied,
    StageDone,
    StagePromoted,
    StageWritten,
)
from mooncake_jax.cluster.copies import BlockCopies
from mooncake_jax.cluster.entrance import Order
from mooncake_jax.cluster.export import Export
from mooncake_jax.cluster.links import Links
from mooncake_jax.cluster.stage_ssd import StageSSD
from mooncake_jax.parallel.prefill import FirstToken, PrefillEngine
from mooncake_jax.parallel.stage import Chunk, PrefillJob
from mooncake_jax.sched.actions import AbandonCopy, FetchBlocks, PromoteBlocks, WriteBlocks

Report = BlocksChecked | StageDone | StageCopied | StagePromoted | StageWritten
Command = CheckBlocks | FetchBlocks | AbandonCopy | PromoteBlocks | WriteBlocks


class PrefillStage:
    """Stage number `stage` of an instance of `stages`. deadline_s: for what one request sends; nobody waits longer."""

    def __init__(
        self,
        node: str,
        stage: int,
        stages: int,
        engine: PrefillEngine,
        store: BlockStore,
        ssd: SSDStore | None,
        links: Links,
        deadline_s: float,
        report: Callable[[Report], None],
        post: Callable[[StageBroken], None],
    ):
        self.node, self.stage, self._stages = node, stage, stages
        self._engine, self._store, self._links, self._report, self._post = engine, store, links, report, post
        self._deadline_s = deadline_s
        self._ssd = StageSSD(stage, store, ssd, report) if ssd is not None else None
        self._copies = BlockCopies(node, stage, store, links, deadline_s, report)
        self._underway: list[Export] = []
        self._check_thread = ThreadPoolExecutor(1, "check")
        self._export_thread = ThreadPoolExecutor(1, "export")
        self._finish_thread = ThreadPoolExecutor(1, "finish")

    def start(self, orders: Callable[[], Iterable[Order]]) -> None:
        """Compute what enters, for ever, on a thread of its own."""
        threading.Thread(target=self._serve, args=(orders,), name="prefill", daemon=True).start()

    def perform(self, command: Command) -> None:
        match command:
            case CheckBlocks():
                self._check_thread.submit(self._check, command)
            case FetchBlocks():
                self._copies.fetch(command)
            case AbandonCopy(dispatch, reason):
                self._copies.abandon(dispatch, reason)
            case PromoteBlocks():
                self._ssd.promote(command)
            case WriteBlocks(order):
                self._ssd.write(order)

    def close(self, deadline_s: float) -> None:
        """Let the SSD tier end what it is writing, for so long at most."""
        if self._ssd is not None:
            self._ssd.close(deadline_s)

    def _check(self, check: CheckBlocks) -> None:
        try:
            sound = self._store.sound(check.blocks)
        except Exception as error:  # answered all the same, or the request would wait for its deadline
            print(f"mooncake-jax: {self.node}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sound = 0
        self._report(BlocksChecked(check.dispatch, self.stage, sound))

    # --- on the engine's thread

    def _serve(self, orders: Callable[[], Iterable[Order]]) -> None:
        while True:
            try:
                for job, result in self._engine.run(self._chunks(orders())):
                    self._finish_thread.submit(self._finish, self._take(job), result)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if self._stages > 1:
                    self._post(StageBroken(reason))
                    return
                for export in self._underway:
                    self._finish_thread.submit(self._fail, export, reason)
                self._underway.clear()

    def _take(self, job: PrefillJob) -> Export:
        export = next(export for export in self._underway if export.job is job)
        self._underway.remove(export)
        return export

    def _chunks(self, orders: Iterable[Order]) -> Iterator[Chunk | None]:
        for order in orders:
            if isinstance(order, EnterPrompt):
                yield from self._engine.chunks(self._begin(order))
            else:
                yield None

    def _begin(self, entered: EnterPrompt) -> PrefillJob:
        run, request, reuse = entered.run, entered.run.request, entered.reuse
        missing, first_layer = stored_blocks(entered), self._engine.layers[0]
        export = Export(run, reuse, frozenset(missing), self._store, first_layer, self._links, self._export_thread)
        self._underway.append(export)
        self._store.claim([run.blocks[i] for i in missing])
        reused_tokens = min(reuse * self._store.layout.tokens, request.prompt_tokens - 1)
        export.job = self._engine.job(
            request.prompt_ids,
            prefix_len=reused_tokens,
            load_layer=lambda layer: export.load_layer(layer, reused_tokens, self._engine.dtype),
            on_layer=export.on_layer,
            sampling=request.sampling,
        )
        return export.job

    # --- on the finishing thread

    def _finish(self, export: Export, result: Callable[[], FirstToken] | None) -> None:
        run = export.run
        try:
            export.finish(self._deadline_s)
            top_logits = () if result is None else self._hand_over(export, result())
        except PeerLost:
            self._fail(export, f"{run.decoding} is lost")
        except TimeoutError:
            self._fail(export, f"its KVCache was not sent within {self._deadline_s:g} s")
        except NotWhole as error:
            self._fail(export, f"a block to reuse was damaged: {error}", damaged=True)
        except Exception as error:
            self._fail(export, f"{type(error).__name__}: {error}")
        else:
            self._report(StageDone(run.dispatch, self.stage, top_logits=top_logits))

    def _hand_over(self, export: Export, first: FirstToken) -> tuple[tuple[int, float], ...]:
        run = export.run
        logprobs = first.logprobs.limited(run.request.sampling.logprobs)
        self._links.send(run.decoding, KVCacheSent(run.dispatch, run.request, first.token, logprobs))
        return first.top_logits

    def _fail(self, export: Export, reason: str, damaged: bool = False) -> None:
        """Conductor gives the slots away when it hears of this: nothing may write them any more."""
        wait([self._export_thread.submit(int)], self._deadline_s)
        self._report(StageDone(export.run.dispatch, self.stage, reason, damaged=damaged))

    # --- called on the messenger's thread

    def on_control(self, source: int, message: Any) -> bool:
        match message:
            case CheckBlocks() | FetchBlocks() | AbandonCopy() | PromoteBlocks() | WriteBlocks():
                self.perform(message)
            case SendBlocks():
                self._copies.send(message)
            case ForgetBlocks(keys):
                self._ssd.forget(keys)
            case CopyFailed(dispatch, reason):
                self._copies.abandon(dispatch, reason)
            case _:
                return False
        return True

    def place(self, source: int, header: Any) -> Sequence[np.ndarray] | None:
        return self._copies.place(header) if isinstance(header, BlocksLayer) else None

    def on_buffers(self, source: int, header: BlocksLayer, buffers: Sequence[np.ndarray]) -> None:
        self._copies.on_buffers(header, buffers[0])


def stored_blocks(entered: EnterPrompt) -> tuple[int, ...]:
    """Which of the request's blocks are stored: those that were missing, and those that turned out damaged."""
    return (*range(entered.reuse, entered.run.reuse), *entered.run.missing)

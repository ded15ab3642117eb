"""How a rank becomes what it is told to be: a stage of a prefill instance, a decoding instance, or one that can do
either.
"""

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from mooncake_jax.cache.one_sided import LentMemory
from mooncake_jax.cache.ssd import SSDStore
from mooncake_jax.cache.ssd_folder import check_folder
from mooncake_jax.cache.store import BlockLayout, BlockStore
from mooncake_jax.cache.transport import AUTO, Transport, choose_transport
from mooncake_jax.cluster.actors import decoding_instance, measured_steps, prefill_instance
from mooncake_jax.cluster.config import ClusterConfig, instance_of
from mooncake_jax.cluster.control import Join, Measured, Ready, Setup
from mooncake_jax.cluster.decoding_hardware import DecodingHardware
from mooncake_jax.cluster.elastic_hardware import ElasticHardware
from mooncake_jax.cluster.following import FollowingStage
from mooncake_jax.cluster.frontend import stop_ids
from mooncake_jax.cluster.links import Links
from mooncake_jax.cluster.measure import measure_prefill, measure_steps, measure_transfer, timed
from mooncake_jax.cluster.prefill_hardware import PrefillHardware
from mooncake_jax.cluster.prefill_stage import PrefillStage
from mooncake_jax.cluster.rank import Hardware
from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import resolve
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.loading import LoadedModel, load_model
from mooncake_jax.model.sources import Location, model_fingerprint, open_source
from mooncake_jax.parallel.compiling import enable_compile_cache
from mooncake_jax.parallel.decoding import DecodingEngine
from mooncake_jax.parallel.peak import measure_peak
from mooncake_jax.parallel.pipeline import PipelineModel, load_pipeline
from mooncake_jax.parallel.prefill import PrefillEngine
from mooncake_jax.parallel.processes import free_address, join_processes, stage_devices, use_cpu_devices
from mooncake_jax.sched.cost_padded import padded_steps
from mooncake_jax.sched.decoding import DecodingInstance
from mooncake_jax.sched.elastic_instance import ElasticInstance
from mooncake_jax.sched.fitting import fit_step
from mooncake_jax.sched.serve import Actor


class Member(Links, Protocol):
    """What a role needs of its rank."""

    node: str

    def post(self, message: object) -> None: ...

    def lend(self, nbytes: int) -> LentMemory: ...

    def expect_join(self) -> Join: ...


Role = tuple[Actor | None, Hardware, Ready]  # only the rank that speaks for its instance has an actor


def become(member: Member, setup: Setup) -> Role:
    """Loads, compiles and measures. Raises UsageError, or whatever keeps this rank from starting."""
    config = setup.config
    enable_compile_cache(Path(config.model_dir) / "compiled")
    path = resolve(config.model, Path(config.model_dir))
    if member.node in config.decoding_nodes:
        return _become_decoding(member, setup, path)
    return _become_stage(member, setup, path)


def _become_decoding(member: Member, setup: Setup, path: Location) -> Role:
    config = setup.config
    decoder = _decoder(member, setup, load_model(path, config.dtype))
    if config.lends_dram:
        member.lend(0)  # all ranks make the window
    fingerprint = model_fingerprint(path, config.dtype)
    nothing = Ready(member.node, fingerprint, 0, None, 0, (), 0, Measured(), None, 0, 0.0)
    return decoder.actor, decoder.hardware, decoder.ready(nothing)


@dataclass(frozen=True, slots=True)
class _Decoder:
    """What decodes on a rank, and what it has measured of itself, if it has. step: its step_coefficients."""

    actor: DecodingInstance
    hardware: DecodingHardware
    points: tuple[tuple[int, int, float], ...]
    step: tuple[float, float, float] | None
    compiled: int
    warm_up_s: float

    def ready(self, rest: Ready) -> Ready:
        """What the rank tells Conductor's, with what is told of the rest of it."""
        return dataclasses.replace(
            rest,
            measured=dataclasses.replace(rest.measured, step=self.points),
            step=self.step,
            compiled=rest.compiled + self.compiled,
            warm_up_s=rest.warm_up_s + self.warm_up_s,
        )


def _decoder(member: Member, setup: Setup, model: LoadedModel) -> _Decoder:
    config, points, step = setup.config, (), None
    layout = config.block_layout(model.config)
    engine = DecodingEngine(model, config.max_batch, config.block_size, config.decoding_pages)
    warm_up_s = timed(engine.warm_up)
    compiled, inline = engine.compile_count, None
    if config.inline_prefill:
        inline = PrefillEngine(model, config.prefill_chunk)
        longest = max(1, min(setup.longest_prompt, config.prefill_chunk))
        warm_up_s += timed(lambda: inline.warm_up(longest))
        compiled += inline.compile_count
    if setup.cost is None:
        points = measure_steps(engine, layout, config.max_batch, model.config.max_context)
        # Here, and not also by Conductor's rank: another machine may round otherwise.
        step = fit_step(padded_steps(points))
    decode = model.tokenizer.decode if model.tokenizer is not None else None
    hardware = DecodingHardware(member.node, engine, layout, decode, member.post, inline)
    actor = decoding_instance(member.node, config, stop_ids(model.tokenizer), setup.cost or measured_steps(step))
    return _Decoder(actor, hardware, points, step, compiled, warm_up_s)


def _become_stage(member: Member, setup: Setup, path: Location) -> Role:
    config, instance = setup.config, instance_of(member.node)
    stage = config.stage_nodes(instance).index(member.node)
    if config.ssd_dir is not None:  # before the model is loaded, which may take minutes
        check_folder(Path(config.ssd_dir) / member.node)
    model = _load_stage(member, config, path, stage)
    architecture = open_source(path).config()
    layout = config.stage_layouts(architecture)[stage]
    engine = PrefillEngine(model, config.prefill_chunk)
    member.transport = _transport(member, config)
    warm_up_s = timed(lambda: engine.warm_up(max(setup.longest_prompt, 1)))
    measured = _measure_stage(member, setup, engine, architecture, stage)
    slots = (config.dram_mib << 20) // BlockStore.bytes_needed(1, layout)
    store = BlockStore(slots, layout, _dram(member, config, BlockStore.bytes_needed(slots, layout)))
    fingerprint = model_fingerprint(path, config.dtype)
    ssd = _open_ssd(member, config, layout, fingerprint, engine.layers)
    ssd_blocks, foreign = (ssd.capacity_blocks, ssd.foreign_bytes) if ssd is not None else (0, 0)
    reads = member.lent.note if member.lent is not None else None
    ready = Ready(
        member.node,
        fingerprint,
        slots,
        reads,
        ssd_blocks,
        _stored(ssd),
        foreign,
        measured,
        None,
        engine.compile_count,
        warm_up_s,
    )

    made_of = (member.node, stage, config.stages, engine, store, ssd, member, config.request_timeout)
    if stage:
        return None, FollowingStage(*made_of, lambda report: member.send(instance, report), member.post), ready
    hardware = PrefillHardware(instance, config.stage_nodes(instance)[1:], config.block_size, member, member.post)
    hardware.start(PrefillStage(*made_of, hardware.on_report, member.post))
    actor = prefill_instance(instance, config)
    if not config.elastic_roles:
        return actor, hardware, ready
    decoder = _decoder(member, setup, model)
    both = ElasticInstance(actor, decoder.actor), ElasticHardware(hardware, decoder.hardware)
    return *both, decoder.ready(ready)


def _dram(member: Member, config: ClusterConfig, nbytes: int) -> np.ndarray | None:
    """Memory for the block store that other prefill instances can read; None where nobody will."""
    try:
        np.empty(nbytes, np.uint8)
    except MemoryError:
        raise UsageError(f"--dram_mib={config.dram_mib}: this machine does not have so much; lower it") from None
    return member.lend(nbytes).memory if config.lends_dram else None


def _transport(member: Member, config: ClusterConfig) -> Transport:
    """Tells what was found, unless nothing was asked for and there is nothing to find."""
    platform = jax.default_backend()
    transport, found = choose_transport(config.transport, platform, config.tp)
    if platform != "cpu" or config.transport != AUTO:
        print(f"{member.node}: {found}", flush=True)
    return transport


def _open_ssd(
    member: Member, config: ClusterConfig, layout: BlockLayout, fingerprint: bytes, layers: Sequence[int]
) -> SSDStore | None:
    """What other layers of the same model have stored is as foreign as another model's."""
    if config.ssd_dir is None:
        return None
    return SSDStore(Path(config.ssd_dir) / member.node, layout, fingerprint, config.ssd_mib << 20, layers[0])


def _stored(ssd: SSDStore | None) -> tuple[tuple[bytes, bytes | None], ...]:
    """What is on the SSD, the least recent first."""
    return tuple((header.key, header.parent) for header in (ssd.headers() if ssd is not None else ()))


def _load_stage(member: Member, config: ClusterConfig, path: Location, stage: int) -> LoadedModel | PipelineModel:
    if config.mesh_shape.devices == 1:
        return load_model(path, config.dtype)
    use_cpu_devices(config.tp)
    if config.stages > 1:
        join_processes(_coordinator(member, config, stage), config.stages, stage)
    return load_pipeline(path, config.dtype, config.mesh_shape, stage_devices(config.tp))


def _coordinator(member: Member, config: ClusterConfig, stage: int) -> str:
    """Where the first stage's rank, which tells the others, will listen."""
    if stage:
        return member.expect_join().coordinator
    address = free_address(platform.node())
    for node in config.stage_nodes(member.node)[1:]:
        member.send(node, Join(address))
    return address


def _measure_stage(member: Member, setup: Setup, engine: PrefillEngine, model: LlamaConfig, stage: int) -> Measured:
    """All stages compute; the last one, which ends each prefill, knows how long it took. Where costs are given there is
    only the peak left to measure.
    """
    config = setup.config
    if setup.cost is not None:
        return Measured(peak_flops=_peak_flops(config))
    together = (lambda: sync_global_devices("measure")) if config.stages > 1 else (lambda: None)
    points = measure_prefill(engine, model, config.prefill_chunk, together)
    last = stage == config.stages - 1
    transfer = measure_transfer(member, config.decoding_nodes[0]) if stage == 0 else ()
    return Measured(prefill=points if last else (), transfer=transfer, peak_flops=_peak_flops(config))


def _peak_flops(config: ClusterConfig) -> float:
    """FLOPs a second of this stage's devices."""
    if config.peak_tflops is not None:
        return config.tp * config.peak_tflops * 1e12
    return measure_peak(jax.local_devices()[: config.tp], config.dtype)

"""Prefill by sequence parallelism: the prompt is cut over devices that all hold the whole model (report 5.1 compares
chunked pipeline parallelism with it).

Ring attention: every layer passes each device's keys and values once around the ring, while the others are attended
over. A device has two pieces of the prompt, the i-th from the front and the i-th from the back, so that under the
causal mask all have equal work. A baseline: it computes one prompt at a time, in one program a layer.

Legend: n devices, T tokens of a piece, H query heads, K KV heads, D head dim, E width.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mooncake_jax.model.attention import TILE, attended_queries, causal_loop, online_softmax, query_rows
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.loading import LoadedModel, Params, load_model
from mooncake_jax.model.sampling import SamplingRows
from mooncake_jax.model.sources import Location
from mooncake_jax.parallel.prefill import FirstToken, first_token
from mooncake_jax.parallel.stage import LoadLayer, finish

SP = "sp"  # the mesh's only axis
_SHORTEST_PIECE = 16


def sequence_mesh(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (SP,), axis_types=(jax.sharding.AxisType.Auto,))


def load_replicated(location: Location, dtype: str, mesh: Mesh) -> LoadedModel:
    """The whole model on every device of the mesh."""
    return load_model(location, dtype, lambda *_: NamedSharding(mesh, P()))


class SequencePrefill:
    """Computes prompts of one model over the devices of a sequence_mesh; all their processes call it alike."""

    def __init__(self, model: LoadedModel, mesh: Mesh):
        """model: as load_replicated gives it."""
        self._model, self._devices = model, mesh.size
        whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P(SP))
        self._embed = jax.jit(partial(_embed, model), out_shardings=(cut, NamedSharding(mesh, P(None, SP))))
        # Not checked: attention's loops start from zeros, the same on all devices, and end with what is not.
        share = partial(jax.shard_map, mesh=mesh, check_vma=False)
        layer = share(
            partial(_layer, model.layer_def, self._devices),
            in_specs=(P(), P(SP), P(None, SP), P(SP), P(), P()),
            out_specs=(P(SP), P(None, SP)),
        )
        self._layer = jax.jit(layer, donate_argnums=1)
        self._row = jax.jit(share(_row, in_specs=(P(SP), P()), out_specs=P()))
        self._finish = jax.jit(partial(finish, model.embedder_def), out_shardings=whole)

    def prefill(
        self, prompt_ids: Sequence[int], prefix_len: int = 0, load_layer: LoadLayer | None = None
    ) -> tuple[FirstToken, Callable[[], np.ndarray]]:
        """The greedy first token, and a function that gives the KV [L, 2, tokens behind the prefix, K, D] where all
        devices are of this process. load_layer(i) gives layer i's KV of the prefix, if there is one.
        """
        ids = np.asarray(prompt_ids, np.int32)[prefix_len:]
        order, piece = self._order(len(ids))
        padded = np.zeros(len(order), np.int32)
        padded[: len(ids)] = ids
        positions = (prefix_len + order).astype(np.int32)
        x, rotary = self._embed(self._model.embedder, padded[order], positions)
        kept = []
        for number, params in enumerate(self._model.layers):
            prefix = self._prefix(load_layer(number) if prefix_len else None)
            x, kv = self._layer(params, x, rotary, positions[::piece], prefix, np.int32(prefix_len))
            kept.append(kv)
        place = np.argsort(order)[: len(ids)]
        last = self._row(x, np.int32(place[-1]))
        computed = self._finish(self._model.embedder, last, np.int32(1), SamplingRows.greedy(1))
        return first_token(computed), lambda: np.stack([np.asarray(kv)[:, place] for kv in kept])

    def _order(self, tokens: int) -> tuple[np.ndarray, int]:
        """The positions of the padded prompt in the order in which they lie on the devices, and a piece's tokens."""
        pieces = 2 * self._devices
        least = -(-tokens // pieces)
        piece = -(-least // TILE) * TILE if least > TILE else max(_SHORTEST_PIECE, 1 << (least - 1).bit_length())
        front = range(self._devices)
        placed = [place for device in front for place in (device, pieces - 1 - device)]
        return (np.array(placed)[:, None] * piece + np.arange(piece)).reshape(-1), piece

    def _prefix(self, prefix: np.ndarray | None) -> np.ndarray:
        """KV of the prefix in whole tiles, a power of two of them."""
        config, dtype = self._model.config, self._model.dtype
        tokens = 0 if prefix is None else prefix.shape[1]
        size = TILE << max(0, (-(-tokens // TILE) - 1).bit_length())
        filled = np.zeros((2, size, config.num_kv_heads, config.head_dim), dtype)
        if prefix is not None:
            filled[:, :tokens] = prefix
        return filled


def _embed(model: LoadedModel, embedder: Params, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return nnx.merge(model.embedder_def, embedder).encode(ids), rotary_table(model.config, positions)


def _layer(
    layer_def: nnx.GraphDef,
    devices: int,
    params: Params,
    x: jax.Array,
    rotary: jax.Array,
    starts: jax.Array,
    prefix: jax.Array,
    prefix_len: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One layer on one device: x [2 T, E], two pieces at starts [2] -> x and their KV [2, 2 T, K, D]."""
    stored = {}

    def attend(q: jax.Array, new: jax.Array) -> jax.Array:
        stored["new"] = new
        return ring_attention(q, new, starts, prefix, prefix_len, devices)

    return nnx.merge(layer_def, params)(x, rotary, attend), stored["new"]


def ring_attention(
    q: jax.Array, kv: jax.Array, starts: jax.Array, prefix: jax.Array, prefix_len: jax.Array, devices: int
) -> jax.Array:
    """Causal attention of this device's two pieces, q [2 T, H, D] at starts [2], over the KV [2, 2 T, K, D] of all
    devices, which goes round, and the first prefix_len tokens of prefix [2, S, K, D].
    """
    piece, (kv_heads, dim) = q.shape[0] // 2, kv.shape[2:]
    queries = [q[:piece], q[piece:]]
    rows = [query_rows(one, kv_heads, start) for one, start in zip(queries, starts, strict=True)]
    width = min(TILE, prefix.shape[1])
    tiles = (prefix_len + width - 1) // width
    # No query may see the padding behind the prefix: to these loops all stand at its last token.
    loops = [[causal_loop(r, jnp.broadcast_to(prefix_len - 1, at.shape), prefix, 0, tiles)] for r, at in rows]
    ring = [(device, (device + 1) % devices) for device in range(devices)]
    for step in range(devices):
        for part in range(2):
            keys, first = kv[:, part * piece : (part + 1) * piece], starts[part]
            for own, (r, at) in zip(loops, rows, strict=True):
                own.append(causal_loop(r, at, keys, first, _seen_tiles(at[0], first, piece)))
        if step < devices - 1:
            kv, starts = jax.lax.ppermute((kv, starts), SP, ring)
    attended = [online_softmax(r.shape[:2], dim, *own) for (r, _), own in zip(rows, loops, strict=True)]
    return jnp.concatenate([attended_queries(a, one) for a, one in zip(attended, queries, strict=True)])


def _seen_tiles(query: jax.Array, key: jax.Array, piece: int) -> jax.Array:
    """Tiles of the piece of keys at key that some query of the piece at query sees: none or all, as pieces are cut."""
    width = min(TILE, piece)
    return jnp.where(query >= key, piece // width, 0)


def _row(x: jax.Array, row: jax.Array) -> jax.Array:
    """One row of hidden states, from whichever device has it, twice: [2, E] (see stage.finish)."""
    own = row - jax.lax.axis_index(SP) * x.shape[0]
    here = (0 <= own) & (own < x.shape[0])
    found = jnp.where(here, jax.lax.dynamic_slice_in_dim(x, jnp.clip(own, 0, x.shape[0] - 1), 1), 0)
    return jnp.repeat(jax.lax.psum(found, SP), 2, axis=0)

"""A cost model from a model's shape and an accelerator's limits (report 2; FAST25 table 1).

A part of the work takes as long as its FLOPs or its bytes do, whichever is longer, at a share of the accelerator's peak
that measurement has to give. Tensor parallelism cuts everything evenly over tp devices, and puts a layer's results
together twice. Weights and KVCache are bfloat16. It extrapolates where nothing was measured: to other models,
accelerators and tp, on the assumption that the shares stay.
"""

from dataclasses import dataclass
from functools import cached_property

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import DTYPE_BYTES, LlamaConfig
from mooncake_jax.sched.accelerators import ACCELERATORS
from mooncake_jax.sched.cost import LinkCosts

_DTYPE = "bfloat16"
_WIDTH = DTYPE_BYTES[_DTYPE]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How near an engine comes to the peaks (shares above 0, at most 1), and what it takes beside, in seconds.

    products: of FLOPS in products with weights; attention: of FLOPS in a prefill's attention; memory: of memory
    bandwidth; links: of link bandwidth. step_s: a decoding step, request_s: each request in it. Raises UsageError for
    a share that is none.
    """

    products: float
    attention: float
    memory: float
    links: float
    step_s: float
    request_s: float

    def __post_init__(self):
        for name in ("products", "attention", "memory", "links"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"efficiency {name} is {getattr(self, name)}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class RooflineCost(LinkCosts):
    """accelerator: a name of ACCELERATORS. reuse_coefficients: seconds of a prefill that reuses a prefix, and of each
    byte of it. Raises UsageError for an unknown accelerator and for weights that tp of them do not hold.
    """

    model: LlamaConfig
    accelerator: str
    tp: int
    efficiency: Efficiency
    reuse_coefficients: tuple[float, float]
    transfer_coefficients: tuple[float, float]
    flow_coefficients: tuple[float, float]
    load_coefficients: tuple[float, float]
    ssd_read_coefficients: tuple[float, float]
    ssd_write_coefficients: tuple[float, float]

    def __post_init__(self):
        if self.accelerator not in ACCELERATORS:
            raise UsageError(f"accelerator is {self.accelerator!r}; use one of {', '.join(ACCELERATORS)}")
        if self.tp < 1:
            raise UsageError(f"tp is {self.tp}; it must be at least 1")
        held, weights = self.tp * ACCELERATORS[self.accelerator].memory_bytes, self.model.parameters * _WIDTH
        if weights > held:
            raise UsageError(
                f"tp is {self.tp}: weights of {weights / 1e9:.0f} GB do not fit into {held / 1e9:.0f} GB of "
                f"{self.tp} {self.accelerator}; raise tp"
            )

    @property
    def peak_flops(self) -> float:
        """FLOPs a second that the accelerators could compute together."""
        return self.tp * ACCELERATORS[self.accelerator].flops

    def prefill(self, tokens: int, prefix: int) -> float:
        seconds = self.prefill_compute(tokens, prefix)
        if prefix:
            reuse, token = self._reuse_s
            seconds += reuse + token * prefix
        return seconds

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        token_s, weights_s, pair_s, gather_s = self._prefill_s
        new = tokens - prefix
        products = new * token_s
        if products < weights_s:
            products = weights_s
        return products + pair_s * new * (prefix + 0.5 * new) + gather_s * new

    def step(self, batch: int, context: int) -> float:
        step_s, token_s, weights_s, context_s, request_s = self._step_s
        products = batch * token_s
        if products < weights_s:
            products = weights_s
        return step_s + products + context_s * context + request_s * batch

    @cached_property
    def _prefill_s(self) -> tuple[float, float, float, float]:
        """Seconds of the products with a token, of reading the layers' weights, of a pair in attention, and of putting
        a token's hidden states together. The head has one token, which is nothing.
        """
        flops = self.peak_flops
        token_s = 2 * layer_weights(self.model) / (flops * self.efficiency.products)
        pair_s = pair_flops(self.model) / (flops * self.efficiency.attention)
        return token_s, self._reading_s(layer_weights(self.model) * _WIDTH), pair_s, self._gather_s

    @cached_property
    def _step_s(self) -> tuple[float, float, float, float, float]:
        """Seconds of a step, of the products with a token, of reading the weights, of a context token, of a request."""
        flops = self.tp * ACCELERATORS[self.accelerator].flops
        weights = layer_weights(self.model) + self.model.vocab_size * self.model.hidden_size
        token_s = 2 * weights / (flops * self.efficiency.products)
        kv_s = self._reading_s(self.model.kv_bytes_per_token(_DTYPE))
        context_s = max(kv_s, pair_flops(self.model) / flops)
        request_s = self.efficiency.request_s + self._gather_s
        return self.efficiency.step_s, token_s, self._reading_s(weights * _WIDTH), context_s, request_s

    @cached_property
    def _reuse_s(self) -> tuple[float, float]:
        constant, byte = self.reuse_coefficients
        return constant, byte * self.model.kv_bytes_per_token(_DTYPE)

    @cached_property
    def _gather_s(self) -> float:
        """Two all-reduces a layer: of each a device sends and receives 2 (tp - 1) / tp times the hidden states."""
        sent = 2 * self.model.num_layers * self.model.hidden_size * _WIDTH * 2 * (self.tp - 1) / self.tp
        return sent / (ACCELERATORS[self.accelerator].link_bytes_per_s * self.efficiency.links)

    def _reading_s(self, nbytes: int) -> float:
        return nbytes / (self.tp * ACCELERATORS[self.accelerator].memory_bytes_per_s * self.efficiency.memory)


def layer_weights(model: LlamaConfig) -> int:
    """Weights of all layers that a token is multiplied with: 2 FLOPs each."""
    query, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.num_layers * model.hidden_size * (2 * query + 2 * keys + 3 * model.intermediate_size)


def pair_flops(model: LlamaConfig) -> int:
    """FLOPs of all layers' attention for a query token and a key token it sees."""
    return 4 * model.num_layers * model.num_heads * model.head_dim

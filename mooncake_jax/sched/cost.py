"""CostModel: how many seconds a prefill, a decoding step and a transfer take (report 6.1, FAST25 4).

Conductor believes one; a simulation also uses one as its hardware. Here: a polynomial fitted to measurements of the
real engine.
"""

from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    def prefill(self, tokens: int, prefix: int) -> float:
        """Seconds to prefill a prompt of `tokens` of which `prefix` are reused."""

    def step(self, batch: int, context: int) -> float:
        """Seconds of a decoding step of `batch` requests with `context` tokens in total."""

    def transfer(self, nbytes: int) -> float:
        """Seconds to move this many bytes between two instances."""


@dataclass(frozen=True)
class PolynomialCost:
    """Polynomials with non-negative coefficients, so that more work never seems cheaper.

    prefill: per request, per computed token, per (computed token x token attended to); step: per step, per request,
    per token of context; transfer: per transfer, per byte. All in seconds.
    """

    prefill_coefficients: tuple[float, float, float]
    step_coefficients: tuple[float, float, float]
    transfer_coefficients: tuple[float, float]

    def prefill(self, tokens: int, prefix: int) -> float:
        constant, linear, quadratic = self.prefill_coefficients
        new = tokens - prefix
        return constant + linear * new + quadratic * new * (prefix + 0.5 * new)

    def step(self, batch: int, context: int) -> float:
        constant, request, token = self.step_coefficients
        return constant + request * batch + token * context

    def transfer(self, nbytes: int) -> float:
        constant, byte = self.transfer_coefficients
        return constant + byte * nbytes

"""CostModel: how many seconds the parts of serving a request take (report 6.1, FAST25 4 and table 1).

Conductor believes one; a simulation also uses one as its hardware, and the two may differ. Kinds: the polynomial here,
measured points (cost_table.py), and a roofline of a model on an accelerator (roofline.py); files of them are
cost_file.py's, named ones profiles.py's. Predictions are bit-equal on every machine: products and sums of floats in a
fixed order, without numpy, exp or log. They are in a simulator's inner loop: keep them cheap.
"""

from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """All times in seconds, sizes in bytes, lengths in tokens."""

    def prefill(self, tokens: int, prefix: int) -> float:
        """How long a prefill instance is taken by a prompt of `tokens` of which `prefix` are reused: loading those
        onto the device included.
        """

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        """Of that the device's own computation (FAST25 figure 8: prefill GPU time); also that of a chunk which ends at
        `tokens` and begins at `prefix`, whose KVCache is on the device.
        """

    def step(self, batch: int, context: int) -> float:
        """A decoding step of `batch` requests with `context` tokens in total."""

    def transfer(self, nbytes: int, flows: int = 1) -> float:
        """Moving this many bytes to another instance, while `flows` transfers, this one included, leave the sender."""

    def load(self, nbytes: int) -> float:
        """From a node's DRAM onto its device, at a decoding instance before a request joins."""

    def read_ssd(self, nbytes: int) -> float:
        """From a node's SSD into its DRAM."""

    def write_ssd(self, nbytes: int) -> float:
        """From a node's DRAM to its SSD."""


class LinkCosts:
    """What moving KVCache takes, for cost models with these coefficients: (seconds of a move, seconds of a byte).

    flow_coefficients: what each further transfer that leaves the sender adds; those of a fair share of one link are
    (0, seconds of a byte).
    """

    transfer_coefficients: tuple[float, float]
    flow_coefficients: tuple[float, float]
    load_coefficients: tuple[float, float]
    ssd_read_coefficients: tuple[float, float]
    ssd_write_coefficients: tuple[float, float]

    def transfer(self, nbytes: int, flows: int = 1) -> float:
        constant, byte = self.transfer_coefficients
        seconds = constant + byte * nbytes
        if flows > 1:
            constant, byte = self.flow_coefficients
            seconds += (flows - 1) * (constant + byte * nbytes)
        return seconds

    def load(self, nbytes: int) -> float:
        constant, byte = self.load_coefficients
        return constant + byte * nbytes

    def read_ssd(self, nbytes: int) -> float:
        constant, byte = self.ssd_read_coefficients
        return constant + byte * nbytes

    def write_ssd(self, nbytes: int) -> float:
        constant, byte = self.ssd_write_coefficients
        return constant + byte * nbytes


@dataclass(frozen=True)
class PolynomialCost(LinkCosts):
    """Polynomials, as FAST25 predicts with. Fitted ones (fitting.py) have no negative coefficient, so that more work
    never seems cheaper. What was not measured is left at 0.

    prefill_coefficients: per prefill, per computed token, per (computed token x token attended to);
    step_coefficients: per step, per request, per token of context;
    prefix_coefficients: per prefill that reuses a prefix, per reused token.
    """

    prefill_coefficients: tuple[float, float, float]
    step_coefficients: tuple[float, float, float]
    transfer_coefficients: tuple[float, float]
    prefix_coefficients: tuple[float, float] = (0.0, 0.0)
    flow_coefficients: tuple[float, float] = (0.0, 0.0)
    load_coefficients: tuple[float, float] = (0.0, 0.0)
    ssd_read_coefficients: tuple[float, float] = (0.0, 0.0)
    ssd_write_coefficients: tuple[float, float] = (0.0, 0.0)

    def prefill(self, tokens: int, prefix: int) -> float:
        constant, linear, quadratic = self.prefill_coefficients
        new = tokens - prefix
        seconds = constant + linear * new + quadratic * new * (prefix + 0.5 * new)
        if prefix:
            reuse, token = self.prefix_coefficients
            seconds += reuse + token * prefix
        return seconds

    def prefill_compute(self, tokens: int, prefix: int) -> float:
        constant, linear, quadratic = self.prefill_coefficients
        new = tokens - prefix
        return constant + linear * new + quadratic * new * (prefix + 0.5 * new)

    def step(self, batch: int, context: int) -> float:
        constant, request, token = self.step_coefficients
        return constant + request * batch + token * context

"""What the actors of a simulated run were made from, as its summary.json keeps it, to make them again."""

import math
from dataclasses import dataclass
from typing import Any

from mooncake_jax.field_types import check_fields
from mooncake_jax.sched.cost_file import resolve_cost
from mooncake_jax.sched.scheduler import NO_TIME_LIMIT, TimeLimit
from mooncake_jax.sched.serve import Actor
from mooncake_jax.simulate.actors import make_actors
from mooncake_jax.simulate.config import UNLIMITED, SimulationConfig


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """believed_cost: what Conductor believed, by its name or file; model: whose costs these are."""

    config: SimulationConfig
    model: str
    believed_cost: str

    def actors(self, time_limit: TimeLimit = NO_TIME_LIMIT) -> dict[str, Actor]:
        """Fresh ones, by node. Raises UsageError where the cost, the policy or the admission cannot be loaded."""
        return make_actors(self.config, resolve_cost(self.believed_cost, self.model), time_limit)

    def to_json(self) -> dict[str, Any]:
        return {"config": self.config.to_json(), "model": self.model, "believed_cost": self.believed_cost}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> "SimulatedSettings":
        """Raises LookupError, TypeError or ValueError if to_json() of this version did not make them."""
        config = {n: math.inf if v is None and n in UNLIMITED else v for n, v in settings["config"].items()}
        config["without"] = frozenset(config["without"])
        check_fields(SimulationConfig, config)
        check_fields(cls, {name: settings[name] for name in ("model", "believed_cost")})
        return cls(SimulationConfig(**config), settings["model"], settings["believed_cost"])

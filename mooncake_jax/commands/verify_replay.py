"""mooncake-jax verify-replay RESULTS: do fresh actors answer a recorded run's messages as its own actors did?

Exit code 0 if all answers are the same, 1 if any differs.
"""

from functools import partial
from pathlib import Path
from typing import Any

from absl import flags

from mooncake_jax.cluster.actors import ActorSettings
from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.cluster.verify import load_run, make_actors, verify
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError
from mooncake_jax.simulate.settings import SimulatedSettings

FLAGS = flags.FlagValues()


def main(arguments: list[str]) -> int:
    folders = FLAGS(["verify-replay", *arguments])[1:]
    if len(folders) != 1:
        raise UsageError(
            f"verify-replay {' '.join(folders)}: name one folder, the --out of a run of replay, or of simulate --events"
        )
    run = Path(folders[0])
    recorded = load_run(run, _settings)
    events = run / "events.jsonl"
    with decision_time() as time_limit:
        actors = make_actors(run, partial(recorded.settings.actors, time_limit))
        with WorkProgress("replaying", "replayed") as progress:
            verified = verify(events, actors, progress.update)
    recorded.check_whole(events, verified.events)
    handled = f"{run}: {verified.events} events of {len(actors)} actors handled again"
    if not verified.differences:
        print(f"{handled}, 0 with other actions")
        return 0
    print(f"{handled}, {len(verified.differences)} with other actions; the first is {verified.differences[0]}")
    return 1


def _settings(values: dict[str, Any]) -> ActorSettings | SimulatedSettings:
    """Of a run on ranks, or in virtual time."""
    return SimulatedSettings.from_json(values) if "believed_cost" in values else ActorSettings.from_json(values)

"""mooncake-jax verify-replay RESULTS: do fresh actors answer a recorded run's messages as its own actors did?

Exit code 0 if all answers are the same, 1 if any differs.
"""

from pathlib import Path

from absl import flags

from mooncake_jax.cluster.time_limit import decision_time
from mooncake_jax.cluster.verify import load_settings, verify
from mooncake_jax.commands.progress import WorkProgress
from mooncake_jax.errors import UsageError

FLAGS = flags.FlagValues()


def main(arguments: list[str]) -> int:
    folders = FLAGS(["verify-replay", *arguments])[1:]
    if len(folders) != 1:
        raise UsageError(f"verify-replay {' '.join(folders)}: name one folder, the --out of a run of replay")
    run = Path(folders[0])
    actors = load_settings(run).actors(decision_time)
    with WorkProgress("replaying", "replayed") as progress:
        verified = verify(run / "events.jsonl", actors, progress.update)
    handled = f"{run}: {verified.events} events of {len(actors)} actors handled again"
    if not verified.differences:
        print(f"{handled}, 0 with other actions")
        return 0
    print(f"{handled}, {len(verified.differences)} with other actions; the first is {verified.differences[0]}")
    return 1

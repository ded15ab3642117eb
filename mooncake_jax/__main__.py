"""The command line: `mooncake-jax COMMAND --flags`, the same as `python -m mooncake_jax COMMAND --flags`.

Bad input ends with one line on stderr and exit code 2.
"""

import importlib
import sys

from absl import flags

from mooncake_jax.errors import UsageError

# name -> (module, what it does); modules are imported only when their command runs: jax takes seconds to load.
COMMANDS = {
    "replay": ("mooncake_jax.commands.replay", "serve prompts or a trace on a cluster of MPI ranks"),
    "verify-replay": ("mooncake_jax.commands.verify_replay", "handle a recorded run's messages again, and compare"),
    "simulate": ("mooncake_jax.commands.simulate", "serve a trace on a cluster in virtual time"),
    "sweep": ("mooncake_jax.commands.sweep", "simulate many combinations of flags, and find how much each can serve"),
    "models": ("mooncake_jax.commands.models", "list the models known by name, and what each takes"),
    "convert": ("mooncake_jax.commands.convert", "turn a GGUF file or an HF folder into Orbax checkpoints"),
    "plan": ("mooncake_jax.commands.plan_cluster", "what a model costs on a cluster's devices, without its weights"),
    "pool": ("mooncake_jax.commands.pool", "list, count, verify or remove the KVCache blocks that are on SSD"),
    "profile": ("mooncake_jax.commands.profile", "measure this machine's engine and links, and fit a cost model"),
    "trace": ("mooncake_jax.commands.trace", "stats, get, generate, convert: what is in a trace, and more of them"),
    "hit-rates": ("mooncake_jax.commands.hit_rates", "block hit rates of a trace, by eviction policy and capacity"),
    "fetch-model": ("mooncake_jax.commands.fetch_model", "bring a small model with real weights to this machine"),
}


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"mooncake-jax: there is no command {name!r}: use one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(COMMANDS[name][0])
        if any(a in ("-h", "--help") for a in rest):
            print(f"mooncake-jax {name}: {COMMANDS[name][1]}\n{command.FLAGS.get_help()}")
            return 0
        return command.main(rest)
    except KeyboardInterrupt:
        print(f"mooncake-jax {name}: interrupted", file=sys.stderr)
        return 130
    except (UsageError, flags.Error) as error:
        print(f"mooncake-jax {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def usage() -> str:
    lines = [f"  {name:<13} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: mooncake-jax COMMAND [--flags]; mooncake-jax COMMAND --help lists its flags", *lines])


if __name__ == "__main__":
    main()

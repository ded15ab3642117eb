"""mooncake-jax fetch-model NAME: bring a model of the catalogue to this machine."""

from pathlib import Path

from absl import flags

from mooncake_jax.errors import UsageError
from mooncake_jax.model.catalog import CATALOG, DEFAULT_MODEL_DIR, fetch_model

FLAGS = flags.FlagValues()
flags.DEFINE_string("model_dir", str(DEFAULT_MODEL_DIR), "folder that models are kept in", flag_values=FLAGS)


def main(arguments: list[str]) -> int:
    names = FLAGS(["fetch-model", *arguments])[1:]
    if len(names) != 1:
        raise UsageError(f"name one model, got {names}: the known ones are {', '.join(CATALOG)}")
    print(fetch_model(names[0], Path(FLAGS.model_dir)))
    return 0

"""Keeps compiled code on disk, so that the ranks of a cluster, and the next run, need not compile it again."""

from pathlib import Path

import jax


def enable_compile_cache(folder: Path) -> None:
    """From now on compiled functions are looked up in folder and stored there; call it before the first one is
    compiled.

    JAX keys entries by program, compile options and version, so folder may be shared by ranks, models and JAX versions.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

"""The compile cache: a second process finds what the first one compiled, and neither says a word."""

import subprocess
import sys

CODE = """
import sys
from pathlib import Path
import jax
from mooncake_jax.parallel.compiling import enable_compile_cache
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
enable_compile_cache(Path(sys.argv[1]))
print(jax.jit(lambda x: (x @ x.T).sum())(jax.numpy.ones((8, 8))))
sys.exit(events.count("/jax/compilation_cache/cache_hits") > 0)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    runs = [
        subprocess.run([sys.executable, "-c", CODE, tmp_path / "new"], capture_output=True, text=True, check=False)
        for _ in range(2)
    ]
    assert [(run.stdout, run.stderr, run.returncode) for run in runs] == [("512.0\n", "", 0), ("512.0\n", "", 1)]

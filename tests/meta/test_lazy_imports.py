import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "transformers", "transformer_lens", "plotly", "pandas", "pyarrow")


def loaded_after(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter holds after the statement."""
    code = f"import sys\n{statement}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(eval(run.stdout))


@pytest.mark.parametrize(
    "statement",
    [
        "import lens",
        "import lens; dir(lens); lens.__version__; lens.LensError",
        "import lens.cli",
    ],
)
def test_importing_lens_loads_nothing_heavy(statement: str) -> None:
    assert loaded_after(statement) == set()


def test_a_heavy_import_is_seen() -> None:
    assert loaded_after("import lens.shapes") >= {"torch"}

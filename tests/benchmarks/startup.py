"""CPU seconds of a whole `lens run`, beside those that transformers takes to import and load."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS = 3
PROMPT = "The old house stood at the end of the road"
PLAIN = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(sys.argv[1])
"""
MODELS = ("tied-twin", "smollm2")


def seconds(name: str) -> list[dict[str, Any]]:
    """The two in turn, each in a process of its own; `value` is what `lens` takes more."""
    import jobs

    import lens

    source = jobs.package_file("smollm2") if name == "smollm2" else name
    found = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = lens.load(source)
        checkpoint.model.save_pretrained(folder)
        checkpoint.tokenizer.save_pretrained(folder)
        plain = [sys.executable, "-c", PLAIN, folder]
        run = [sys.executable, "-m", "lens", "run", str(source), PROMPT]
        _cpu_seconds(run)  # compiles, fills caches
        for _ in range(ROUNDS):
            theirs, ours = _cpu_seconds(plain), _cpu_seconds(run)
            found.append({"value": ours - theirs, "plain": theirs, "seconds": ours})
    return found


def _cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = str(Path(__file__).parents[2])
    subprocess.run(
        command, check=True, capture_output=True, cwd=root, env=os.environ | {"PYTHONPATH": root}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

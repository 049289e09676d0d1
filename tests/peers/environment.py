"""Environments of their own for trainers' libraries, which pin what we do not.

Each stands on this environment's packages (torch above all, which is large) and puts its own first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

TRL = [["trl==1.16.0", "transformers==5.24.0", "accelerate==1.15.0", "datasets==5.2.0"]]
VERL = [
    ["--no-deps", "verl==0.9.1", "tensordict==0.10.0"],
    ["ray", "pyvers", "cloudpickle", "omegaconf", "hydra-core", "codetiming", "dill", "orjson",
     "torchdata", "transformers>=5.5.3,<5.11", "accelerate", "peft", "datasets", "cachetools",
     "fastapi", "uvicorn", "aiohttp"],
]  # fmt: skip
VERIFIERS = [["verifiers==0.4.0"]]
"""What pip is told, in order; verl's own requirements would replace torch and NumPy."""


def made(folder: Path, installs: list[list[str]]) -> Path:
    """The Python of a new environment in `folder` that sees our packages behind its own."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    site = next(folder.glob("lib/python*/site-packages"))
    behind = [sysconfig.get_path("purelib"), str(ROOT / "src")]
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    for wanted in installs:
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
        subprocess.run(pip, check=True)
    return python


def measured(python: Path, script: str, folder: Path) -> dict[str, Any]:
    """What a script of this folder prints as its last line, a JSON object."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder.mkdir()
    done = subprocess.run(
        [python, HERE / script, folder], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told

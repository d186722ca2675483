"""The commands of README.md and CONTRIBUTING.md, and what `test_readme_commands.py` has to know about some of them.

INSTEAD holds those that would take too long, or need another's output; NOT_RUN those that only a network or another system can
run; NEED_GPU those that end with an error without one; SAYS what the output holds.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).parents[2]
README, CONTRIBUTING = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
TOKENS = [token for text in (README, CONTRIBUTING) for token in MarkdownIt().enable("table").parse(text)]
IN_PROSE = re.compile(r"([A-Z_]+=\S+ )*(deepinfer-lab|make|pip|python|pytest|dask|conda|jupytext|apt-get) ")
GRID = next(t.content for t in TOKENS if t.type == "code_block" and t.content.startswith("experiment: "))
PYTHON = shlex.join(["python", "-c", next(t.content for t in TOKENS if t.type == "fence" and t.info == "python")])


def commands() -> list[str]:
    """Every line of a block, the block of Python, and each command in prose that is not only how others begin."""
    blocks = [t for t in TOKENS if t.type == "code_block" or (t.type == "fence" and t.info != "python")]
    block_lines = [line for t in blocks if t.content != GRID for line in t.content.splitlines() if line.strip()]
    spans = [child.content for t in TOKENS for child in t.children or () if child.type == "code_inline"]
    lines = dict.fromkeys(re.split(r"\s+# ", line)[0].strip() for line in block_lines)
    in_prose = dict.fromkeys(span for span in spans if IN_PROSE.match(span) and span not in lines)
    mentions = {span for span in in_prose if any(other.startswith(f"{span} ") for other in (*lines, *in_prose))}
    return [*lines, PYTHON, *(span for span in in_prose if span not in mentions)]


def before_few_bits(project: Path) -> None:
    """Notebook 00 without its second half, which measures for a minute, whatever the parameters."""
    path = project / "notebooks" / "00_serve_a_real_model.ipynb"
    notebook = nbformat.read(path, as_version=4)
    starts = next(i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and "few_bits" in c.source)
    nbformat.write(nbformat.from_dict({**notebook, "cells": notebook.cells[:starts]}), path)


def gpu_has_measured(project: Path) -> None:
    """A record of the H200's, as new as a measurement leaves it."""
    name = Path("data", "nvidia-h200", "w3_batch_tile.json")
    (project / "build" / name).parent.mkdir(parents=True)
    shutil.copyfile(project / name, project / "build" / name)


def small_sweep(project: Path) -> None:
    """A cell of seconds."""
    grid = {"policy": ["mixed"], "concurrency": [[1]], "prompt_tokens": [16], "output_tokens": [4]}
    text = json.dumps({"experiment": "serve_real_model", "grid": grid})
    (project / "small.yml").write_text(text, encoding="utf-8")


def tiny_model(project: Path) -> None:
    """A random model of one layer that reads bytes, in Hugging Face format: GPTQ is done with it in a second."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    config = LlamaConfig(vocab_size=256, num_attention_heads=2, num_key_value_heads=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(project / "tiny")
    letters = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.save(str(project / "tiny" / "tokenizer.json"))


@dataclass(frozen=True)
class Instead:
    """What is run in a command's place, and why; `prepare` makes what has to lie in the project before."""

    why: str
    run: str
    prepare: Callable[[Path], None] = lambda project: None


# By themselves these take up to a minute and more each, for measurements that are worth something.
SERVE = "deepinfer-lab bench serve"
SHORT = "--rounds 1 --concurrency 1 --requests 1 --prompt-tokens 16 --output-tokens 4"
DOCUMENT = "--readers 2 --prompt-tokens 16 --document-tokens 64"
DRY = "its steps, without running them: pip needs a network; "
CLUSTER = Instead(
    "an address of this machine, and a sweep of seconds",
    """dask scheduler --host 127.0.0.1 --port 0 --no-dashboard --scheduler-file scheduler.json 2> scheduler.log &
    started=$!
    trap 'kill $started' EXIT
    while kill -0 $started && [ ! -s scheduler.json ]; do sleep 0.1; done
    address=$(python -c 'import json; print(json.load(open("scheduler.json"))["address"])')
    CUDA_VISIBLE_DEVICES=0 dask worker "$address" --nthreads 1 --memory-limit 0 --no-dashboard 2> worker.log &
    started="$started $!"
    deepinfer-lab run --sweep small.yml --dask "$address" """,
    small_sweep,
)
MEASURE = Instead(
    "one notebook, whose first half alone is measured, with fewer tokens",
    "deepinfer-lab run --only 00 --mode measure --param concurrency=[1,4] --param prompt_tokens=16 --param output_tokens=4",
    before_few_bits,
)
PUBLISH = Instead("one notebook: `pytest --nbval` replays all", "deepinfer-lab publish --only index", gpu_has_measured)
JOIN = "deepinfer-lab run --sweep sweeps/chunk_inflight.yml --dask tcp://10.0.0.1:8786"
WORKER = "CUDA_VISIBLE_DEVICES=0 dask worker tcp://10.0.0.1:8786 --nthreads 1 --memory-limit 0"
VENV = "python -m venv --without-pip .venv"
TO_IPYNB = "jupytext --to ipynb notebooks/scripts/{0}.py -o notebooks/{0}.ipynb"
VERIFY = "DEEPINFER_VERIFICATION=data/{}/verification.json python -m pytest tests/gpu"
SANITIZE = "python tests/gpu/sanitize.py data/{}/sanitizer.json"

INSTEAD: Mapping[str, Instead] = {
    "make run": Instead(
        DRY + "`deepinfer-lab run` has a line of its own", "make -n run && deepinfer-lab fetch smollm2-135m"
    ),
    "make test": Instead(DRY + "pytest runs this test", "make -n test"),
    "make lab": Instead("a server; tests/browser/ looks at it", "make -n lab"),
    "python -m venv .venv": Instead("pip need not be in it", f"{VENV} && ls .venv"),
    r".venv\Scripts\activate": Instead(
        "so it is called on Windows", f"{VENV} && . .venv/bin/activate && command -v python"
    ),
    "deepinfer-lab run": Instead("one notebook: `pytest --nbval` runs all", "deepinfer-lab run --only index"),
    "pytest --nbval": Instead("this test runs inside it", "pytest --nbval --collect-only notebooks"),
    f"{SERVE} --against transformers --bits none": Instead(
        "fewer tokens", f"{SERVE} --against transformers --bits none {SHORT}"
    ),
    f"{SERVE} --load insertion --trace run.json": Instead(
        "fewer tokens", f"{SERVE} --load insertion --trace run.json --rounds 1 {DOCUMENT}"
    ),
    f"{SERVE} --load insertion --policy dual-stream --rounds 1 --trace run.json": Instead(
        "fewer tokens", f"{SERVE} --load insertion --policy dual-stream --rounds 1 --trace run.json {DOCUMENT}"
    ),
    f"{SERVE} --bits w4-all": Instead("fewer tokens", f"{SERVE} --bits w4-all {SHORT}"),
    "deepinfer-lab quantise smollm2-135m w3 --bits w3 --method gptq": Instead(
        "a model of one layer, not of 30; then what the comment says",
        "deepinfer-lab quantise tiny w3 --bits w3 --method gptq && deepinfer-lab generate hello --model w3 --bits w3",
        tiny_model,
    ),
    "deepinfer-lab quality --bits w4,w3 --method rtn,gptq": Instead(
        "a model of one layer", "deepinfer-lab quality --bits w4,w3 --method rtn,gptq --model tiny", tiny_model
    ),
    "deepinfer-lab run --only 00 --param 'concurrency=[1,4]'": MEASURE,
    "deepinfer-lab run --mode measure": MEASURE,
    "deepinfer-lab run --only NN --mode measure": MEASURE,
    "deepinfer-lab publish": PUBLISH,
    "deepinfer-lab publish --only NN": PUBLISH,
    "deepinfer-lab run --sweep sweeps/policies.yml": Instead(
        "a cell of seconds", "deepinfer-lab run --sweep small.yml", small_sweep
    ),
    JOIN: CLUSTER,
    WORKER: CLUSTER,
    "dask scheduler": CLUSTER,
    "deepinfer-lab compare nvidia-h200 build/data/nvidia-h200": Instead(
        "new records are needed", "deepinfer-lab compare nvidia-h200 build/data/nvidia-h200", gpu_has_measured
    ),
    TO_IPYNB.format("NN_title"): Instead("NN_title is a notebook", TO_IPYNB.format("01_tiled_gemm")),
    VERIFY.format("<gpu>"): Instead("<gpu> is a device", VERIFY.format("nvidia-h200")),
    SANITIZE.format("<gpu>"): Instead("<gpu> is a device", SANITIZE.format("nvidia-h200")),
}

NOT_RUN: Mapping[str, str] = {
    'pip install -e ".[cuda12,test]" -c constraints/replay.txt': "installs from the network; a test looks the extras up",
    'pip install -e ".[cluster]"': "likewise",
    'pip install -e ".[explore]"': "likewise",
    'pip install "cuda-bindings==12.*"': "installs from the network; nothing of it is the project's",
    "conda env create -f environment.yml && conda activate deepinfer-lab": "likewise; tests/test_environment.py reads the file",
    "apt-get install chromium": "changes the machine",
}

# Without a GPU these end with one line that says so.
NEED_GPU = {
    "deepinfer-lab tune --model synthetic:qwen2.5-3b": "Error: tune measures on a CUDA GPU, .* finds none here",
    "deepinfer-lab bench kernels --against humming,gemlite": "Error: bench kernels measures on a CUDA GPU, .* finds none here",
    "deepinfer-lab run --sweep sweeps/chunk_inflight.yml --dask local": "Error: .*(needs a CUDA GPU|needs dask.distributed)",
    SANITIZE.format("<gpu>"): "compute-sanitizer watches kernels on a CUDA GPU, .* finds none here",
}

# What the output holds, beyond that it is not empty: regular expressions, in which ^ and $ are a line's ends.
SAYS = {
    "make run": r"pip install(.*\n)+.*/deepinfer-lab fetch smollm2-135m\n.*/deepinfer-lab run\n(.*\n)*smollm2-135m: /",
    "make test": r"ruff check(.*\n)+.*lint-imports\n.*pytest --nbval$",
    "make lab": r"jupyter lab .*notebooks/index\.ipynb$",
    "make help": r"make run\t(.*\n)+ *make test\t",
    r".venv\Scripts\activate": r"/\.venv/bin/python$",
    "pytest --nbval": r"notebooks/00_serve_a_real_model\.ipynb::",
    'deepinfer-lab generate "What is the capital of France?"': "Paris",
    PYTHON: r"\bParis\b",
    f"{SERVE} --against transformers --bits none": r"^deepinfer-lab +none +1 +\d(.*\n)+transformers +none +1 +\d",
    f"{SERVE} --load insertion --trace run.json": r"^document's TTFT: \d",
    f"{SERVE} --bits w4-all": r"^deepinfer-lab +w4-all +1 +\d",
    "deepinfer-lab bench scheduler": r"^ +1 +\d+ us(.*\n)+ +256 +\d+ us",
    "deepinfer-lab quantise smollm2-135m w3 --bits w3 --method gptq": r"(?s)^w3/quantised\.safetensors: [^\n]* MB\n.*\S",
    "deepinfer-lab quality --bits w4,w3 --method rtn,gptq": r"^w4 +rtn +64 +\d(.*\n)+w3 +gptq +64 +\d",
    "deepinfer-lab run": r"^index +done",
    "deepinfer-lab run --mode measure": r"serve_real_model +OK(.*\n)+records: .*serve_real_model\.json",
    "deepinfer-lab publish": r"/data/nvidia-h200/w3_batch_tile\.json\n.*/notebooks/index\.ipynb",
    "deepinfer-lab check": r"^\d+ notebooks, \d+ failure",
    "deepinfer-lab report": r"build/report\.html$",
    "deepinfer-lab site": r"build/site/index\.html$",
    "deepinfer-lab list": r"(?s)Notebooks.*00_serve_a_real_model.*Experiments.*Models.*smollm2-135m.*Policies.*adaptive",
    "deepinfer-lab info": r"(?s)python: .*records: .*bench_serve\.json",
    "deepinfer-lab kernels": r"^w4_tiled_gemm +sm_90",
    "deepinfer-lab run --sweep sweeps/policies.yml --list": r"^0 of [1-9]\d* cells are done",
    "deepinfer-lab run --sweep sweeps/policies.yml": r"^policy=mixed,.* OK .*here$",
    JOIN: r"^policy=mixed,.* OK .*tcp://\S+$",
    "deepinfer-lab compare nvidia-h200 build/data/nvidia-h200": r"^\d+ lines, 0 flagged",
    "deepinfer-lab compare cpu-amd-epyc-2-cores nvidia-h200 --experiment few_bits --picture build/few_bits.svg": r"few_bits ",
    VERIFY.format("<gpu>"): r"^\d+ skipped in",
}
STATUS = dict.fromkeys(NEED_GPU, 1)

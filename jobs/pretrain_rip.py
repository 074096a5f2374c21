"""Pretrain a backbone for retrieval on the corpus (DPTDR's RIP; coCondenser and plain MLM to compare); resumes.

python jobs/pretrain_rip.py --store data/squad --backbone google-bert/bert-base-uncased --name rip --epochs 4
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jobs.cli import human, run, say
from jobs.training import Contrastive, check_name, count_steps

from indexing.corpus import Corpus
from indexing.models import resolve_model
from indexing.pretraining import RipMaker, drawable
from indexing.store import Store
from retriever.errors import InputError
from retriever.files import describe_backbone, resolve, weight_files
from retriever.options import EncoderOptions
from retriever.reranker_training import check_length
from retriever.rip import RipOptions, encoder_options
from retriever.training import HOW, LoopOptions


@dataclass(frozen=True, kw_only=True)
class PretrainRip(Contrastive):
    """--limit N takes the first N passages."""

    backbone: str
    """A Hugging Face name, a folder, or models/NAME of the store."""
    name: str | None = None
    """The model's name; default: the last piece of the backbone's, and the objective."""
    objective: Literal["rip", "condenser", "mlm"] = "rip"
    """rip: two sentences of a passage find each other, and masked words; condenser: coCondenser's; mlm: words only."""
    unit: Literal["sentence", "span"] = "sentence"
    train: Literal["backbone", "prompts"] = "backbone"
    """prompts: a deep prompt over the frozen backbone; the result is prompts/NAME."""
    prompt_length: int | None = None
    """Of --train prompts, in tokens, by default 32; what is begun from them (tune_prompts --init) takes it over."""
    epochs: float = 4.0
    """DPTDR: 8 on MS MARCO, 4 on Wikipedia."""
    steps: int | None = None
    """Instead of --epochs."""
    batch: int = 2048
    """Passages a step, over all workers (DPTDR)."""
    lr: float = 1e-4
    warm_up: float = 0.1
    weight_decay: float = 0.01
    mlm_probability: float = 0.15
    max_length: int = 128
    """Tokens of a sentence (of a passage, with mlm)."""
    pooling: Literal["cls", "mean"] = "cls"
    language: str = "en"


def main(options: PretrainRip) -> None:
    store = Store(options.store).require()
    options.check("passage", "--train prompts" if options.train == "prompts" else None)
    corpus = Corpus.open(store)
    folder = resolve(resolve_model(store, options.backbone))
    described = describe_backbone(folder)
    check_length(folder, options.max_length)
    if options.prompt_length is not None and options.train != "prompts":
        raise InputError(f"--prompt-length {options.prompt_length}: only --train prompts has one")
    names = set(RipOptions.__dataclass_fields__) & set(PretrainRip.__dataclass_fields__) - {"steps"}
    if options.prompt_length is None:
        names.remove("prompt_length")
    most = min(corpus.num_rows, options.limit or corpus.num_rows)  # passages; which can be drawn is seen later
    steps = count_steps(options.steps, options.epochs, most, options.batch)
    rip = RipOptions(steps=steps, **{name: getattr(options, name) for name in names})
    loop = LoopOptions(
        steps=steps, **{name: getattr(options, name) for name in (
            "lr", "seed", "warm_up", "weight_decay", "zero", "offload", "grad_cache", "checkpoint_every")}
    )  # fmt: skip
    kind = "prompts" if options.train == "prompts" else "models"
    name = options.name or f"{options.backbone.rstrip('/').rpartition('/')[2]}-{options.objective}"
    check_name(kind, name)
    if options.plan:
        return plan(options, most, steps, sum(file.stat().st_size for file in weight_files(folder)))
    name = name if options.limit is None else f"{name}-limit{options.limit}"
    shaping = {key: value for key, value in asdict(loop).items() if key not in ("steps", *HOW)}
    config = {
        "backbone": described, "rip": {key: value for key, value in asdict(rip).items() if key != "steps"},
        "loop": shaping, "epochs": None if options.steps is not None else options.epochs, "steps": options.steps,
        "limit": options.limit, "cpus": options.cpus, "dtype": options.dtype,
    }  # fmt: skip
    inputs = {"corpus": corpus.generations[-1]}
    if options.backbone.startswith("models/"):
        inputs["backbone"] = store.open(*options.backbone.split("/", 1))

    def prepare() -> tuple[RipMaker, LoopOptions, dict[str, Any]]:
        import ray

        rows = drawable(corpus, rip, options.limit)
        known = replace(loop, steps=count_steps(options.steps, options.epochs, len(rows), options.batch))
        maker = RipMaker(store=store, backbone=options.backbone, described=described, rows=ray.put(rows), options=rip,
                         checkpointing=options.checkpointing)  # fmt: skip
        own = encoder_options(rip) if kind == "prompts" else EncoderOptions(pooling=rip.pooling, normalize=False)
        return maker, known, {"backbone": options.backbone, "passages": len(rows), "options": asdict(own)}

    artifact = options.make(store, kind, name, inputs=inputs, config=config, prepare=prepare)
    notes = artifact.notes
    say(f"{artifact.url}: {notes['steps']:,} steps over {notes['passages']:,} of {corpus.num_rows:,} passages, last "
        f"loss {notes['loss']:.4f}, {notes['numerics']}")  # fmt: skip
    options.draw(artifact)
    return None


def plan(options: PretrainRip, rows: int, steps: int, weights: int) -> None:
    """What a training reads and writes; the time only a first run can tell."""
    units = 1 if options.objective == "mlm" else 2
    say(f"passages  up to {rows:,}, those of one {options.unit} are left out")
    say(f"steps     {steps:,} of {units * options.batch:,} texts, on {options.workers} workers")
    if options.train == "prompts":
        say(f"writes    a prompt, and a checkpoint of three times its size every {options.checkpoint_every} steps")
    else:
        every = options.checkpoint_every
        say(f"writes    {human(weights)}, and a checkpoint of {human(3 * weights)} every {every} steps")


if __name__ == "__main__":
    run(main, PretrainRip)

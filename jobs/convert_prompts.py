r"""Convert prompts from DPTDR's authors or PEFT, or to PEFT's prefix tuning.

    riptide convert-prompts --store data/nq --task nq --source retriever_model \
        --backbone models/uscl --pooling cls --query-length 32 --passage-length 128
    riptide convert-prompts --store data/nq --task nq --to nq-peft
"""

from __future__ import annotations

from riptide.jobs.commands.cli import run

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from riptide.base.arguments import expand_home
from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Parameter
from riptide.indexing.embeddings.named_encoders import EncoderSpec
from riptide.indexing.storage.cache import file_sha256
from riptide.indexing.store.draft import ABANDONED_S
from riptide.indexing.store.model_artifacts import commit_files, model_folder
from riptide.indexing.store.result_files import write_folder
from riptide.indexing.store.sealed_json import fingerprint_of
from riptide.indexing.store.store import Store, check_name
from riptide.indexing.work.work import ArtifactTarget, complete_target, target_draft
from riptide.jobs.common.flat_options import options_by_name
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import WARNING, print_complete, say
from riptide.process.memory import format_bytes
from riptide.process.temporary_folders import TemporaryFolder
from riptide.retriever.model.model_folder import find_model_folder
from riptide.retriever.options import DEFAULT_OPTIONS, EncoderOptions, TextOptions

if TYPE_CHECKING:  # keeps torch out of --help
    from riptide.retriever.interchange.prompt_conversion import ImportedPrompt
    from riptide.retriever.prompts.task_prompt import TaskPrompt

_TOOLS = {"dptdr": "DPTDR's authors", "peft": "PEFT"}


@dataclass(frozen=True, kw_only=True)
class ConvertPrompts(Common):
    """Give --source to read a prompt, or --to to write one."""

    GROUP: ClassVar = "prompt"
    MAKES: ClassVar = ("tasks",)
    NAMED_BY: ClassVar = ("task",)
    READS: ClassVar = {"backbone": "models"}

    task: str
    """Name of the task: prompts/TASK of the store."""
    source: str | None = option(None, metavar="PATH")
    """Prompt of another tool: a checkpoint of DPTDR's authors (a state dict, a model's folder, or a folder with
    query_model and passage_model), or a folder of PEFT (an adapter, or query/ and passage/ with one each)."""
    to: str | None = option(None, metavar="FOLDER")
    """Folder to write for PEFT: an adapter, or query/ and passage/ with one each if the prompts of the sides differ."""
    backbone: str | None = None
    """Backbone that the prompt of --source was trained with: a Hugging Face name, a folder, or models/NAME of the
    store."""
    side: Literal["query", "both"] = "both"
    """query: passages are encoded without a prompt; both: both sides have a prompt."""
    position_offset: bool = True
    """Let the positions of a text start after the prompt, as in the code of DPTDR's authors and in PEFT's. The prompt's
    length and the maximum length of a text together then need as many positions."""
    vectors: TextOptions = field(default_factory=TextOptions)


def main(options: ConvertPrompts) -> None:
    check_options(options)
    store = Store(options.store).require_not_empty()
    check_name("prompts", options.task)
    if options.to is not None:
        export_prompt(store, options, options.to)
    else:
        import_prompt(store, options)


def check_options(options: ConvertPrompts) -> None:
    """Raises InputError unless all options belong to one direction: import or export."""
    if (options.source is None) == (options.to is None):
        raise InputError(
            f"give one of {Parameter('source')}, a prompt of another tool, and {Parameter('to')}, the folder to write: "
            f"found {'neither' if options.to is None else 'both'}"
        )
    if options.source is not None and options.backbone is None:
        raise InputError(
            f"{Parameter('source', options.source)}: expected {Parameter('backbone')} too, with which the prompt "
            f"was trained"
        )
    allowed = {"store", "task", "plan", *(("to",) if options.to is not None else _SOURCE_OPTIONS)}
    for each in options_by_name(ConvertPrompts).values():
        value = each.value(options)
        if each.name not in allowed and value != each.default:
            direction = (
                f"{Parameter('to', options.to)}" if options.to is not None else f"{Parameter('source', options.source)}"
            )
            raise InputError(
                f"{direction} {Parameter(each.name, value)}: a conversion in this direction has no such option; "
                f"leave it out"
            )
    if options.vectors.pooling == "splade":
        raise InputError(
            f"{Parameter('pooling', 'splade')}: prompts of other tools are for dense vectors: expected cls, mean "
            f"or last"
        )


_SOURCE_OPTIONS = set(options_by_name(ConvertPrompts)) - {"to", "limit"}


def import_prompt(store: Store, options: ConvertPrompts) -> None:
    """Converts a prompt of another tool to prompts/TASK."""
    from riptide.retriever.interchange.backbone import open_backbone
    from riptide.retriever.interchange.prompt_conversion import make_task_prompt, read_prompt
    from riptide.retriever.model.recipe import read_recipe
    from riptide.retriever.prompts.task_prompt import SETTINGS, WEIGHTS

    assert options.source is not None
    assert options.backbone is not None
    encoder = EncoderOptions(**asdict(options.vectors))
    spec = EncoderSpec(store, options.backbone, encoder)
    backbone_settings = spec.settings("query")
    recipe = read_recipe(find_model_folder(spec.folder), encoder)
    backbone = open_backbone(options.backbone, recipe)
    imported = read_prompt(expand_home(options.source), backbone)
    prompt = make_task_prompt(
        imported, backbone, recipe, encoder, side=options.side, position_offset=options.position_offset
    )
    with TemporaryFolder("prompt") as folder:
        prompt.save(Path(folder))
        files = [Path(folder, name) for name in (SETTINGS, WEIGHTS)]
        config = {
            "backbone": backbone_settings,
            "converted": {"prompt": fingerprint_of([file_sha256(file) for file in files])},
            "side": options.side,
            "position_offset": options.position_offset,
        }
        models = {"backbone": ("backbone", options.backbone), "converted": ("source", options.source)}
        target = ArtifactTarget("prompts", options.task, spec.inputs(), config, models=models)
        if options.plan and (complete := complete_target(store, target)):
            return print_complete(complete.url)
        say(f"prompt    {describe_prompt(prompt)}, of {_TOOLS[imported.format]}")
        say(f"backbone  {describe_backbone_check(imported, options.backbone)}")
        size = format_bytes(sum(file.stat().st_size for file in files))
        if options.plan:
            target_draft(store, target).check(abandoned_s=ABANDONED_S)
            say(f"writes    prompts/{options.task}, {size}")
            return None
        with target_draft(store, target).begin(abandoned_s=ABANDONED_S) as draft:
            if not draft.is_complete:
                draft.add_notes(backbone=options.backbone, options=encoder.to_dict(), format=imported.format)
                commit_files(draft, Path(folder))
    say(f"{store.open('prompts', options.task).url}: {size}")
    return None


def describe_prompt(prompt: TaskPrompt) -> str:
    """Returns a description of a prompt: the number of tokens on each side."""
    prompts_by_side = {"queries": prompt.query, "passages": prompt.passage}
    sides = [f"{matrix.shape[3]} tokens for {name}" for name, matrix in prompts_by_side.items() if matrix is not None]
    is_tied = prompt.query is prompt.passage
    start = "after" if prompt.position_offset else "at their usual position, not after"
    return f"{f'{sides[0]} and passages' if is_tied else ', '.join(sides)}; texts start {start} it"


def describe_backbone_check(imported: ImportedPrompt, backbone: str) -> str:
    """Returns a sentence that says whether the backbone in the prompt's files, if any, is the named one."""
    if imported.num_equal_tensors:
        return f"{backbone}, equal to the one in the files in all {imported.num_equal_tensors:,} tensors"
    return f"{backbone}; the files hold no weights to compare it with, only the shape"


def export_prompt(store: Store, options: ConvertPrompts, to: str) -> None:
    """Exports prompts/TASK to files of PEFT."""
    from riptide.retriever.interchange.prompt_conversion import check_writable, write_prompt
    from riptide.retriever.prompts.task_prompt import load_prompt

    artifact = store.open("prompts", options.task)
    prompt = load_prompt(model_folder(artifact))
    check_writable(prompt)
    name = artifact.notes.get("backbone")
    base_model = name if isinstance(name, str) and not name.startswith("models/") else None
    if "://" in to:
        raise InputError(f"{Parameter('to', to)}: expected a folder that this machine sees")
    say(f"prompt    {describe_prompt(prompt)}")
    say(*(f"{WARNING}{warning}" for warning in export_warnings(prompt)))
    with TemporaryFolder("peft") as folder:
        write_prompt(Path(folder, "peft"), prompt, base_model)
        write_folder(Path(folder, "peft"), expand_home(to), plan=options.plan)
    say(f"{'would write' if options.plan else 'wrote'} {to} for PEFT")


def export_warnings(prompt: TaskPrompt) -> list[str]:
    """Returns warnings about the differences between the vectors of PEFT and those of the encoder."""
    shaping = {name: value for name, value in prompt.options.to_dict().items() if name not in ("dtype", "compile")}
    options = {name: value for name, value in shaping.items() if value != getattr(DEFAULT_OPTIONS, name)}
    warnings = []
    if not prompt.position_offset:
        warnings.append(
            "in PEFT the positions of a text start after the prompt, and this one was trained with texts "
            "at their usual positions: pass position_ids"
        )
    if options:
        listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        warnings.append(f"PEFT's files do not hold {listed}: set them again in the program that opens the prompt")
    return warnings


if __name__ == "__main__":
    run(main, ConvertPrompts)

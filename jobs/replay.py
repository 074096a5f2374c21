"""Send saved requests again, and compare their hits with the saved ones.

    riptide replay requests.jsonl --store data/squad --write results/expected.jsonl
    riptide replay results/expected.jsonl --store data/squad --release 0123456789abcdef
    riptide replay results/expected.jsonl --url http://127.0.0.1:8000 --max-changed 5

The exit status is 1 if more than --max-changed requests return different hits.
"""

from __future__ import annotations

from riptide.jobs.commands.cli import exit_with_error, run

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from riptide.base.errors import InputError
from riptide.base.option_fields import option
from riptide.base.wording import Command, Parameter, list_first
from riptide.indexing.files.raw import Lines, short_repr
from riptide.indexing.store.result_files import check_result_file, json_lines, write_files
from riptide.indexing.store.store import Store
from riptide.jobs.common.flat_options import Heading
from riptide.jobs.common.job_options import Common
from riptide.jobs.common.printing import say
from riptide.jobs.common.session import num_gpus
from riptide.retriever.model.json_fields import parse_json

if TYPE_CHECKING:  # keeps the server out of --help
    from riptide.serve.protocol import SearchRequest
    from riptide.serve.release.release import Release

LINES_AT_ONCE = 1 << 16
SHOWN = 10  # maximum number of ids in a line
# Fields of saved requests that are not sent: they do not change complete hits.
UNSENT = frozenset({"release", "explain", "allow_partial", "timeout_ms"})
TIMEOUT_S = 600.0  # seconds of a request in this process
RETRIES = 5  # maximum number of repetitions of a request that a busy server refuses
MAX_WAIT_S = 60.0  # maximum seconds between two of them; a server that asks for more is not asked again
Verdict = Literal["equal", "moved", "lost"]
# Sends a request, with the raised settings of a response: `SearchResponse.raised_settings`.
Search = Callable[["SearchRequest", Mapping[str, int]], "Answer"]


@dataclass(frozen=True, kw_only=True)
class Replay(Common):
    GROUP: ClassVar = "requests"

    requests: str = option(positional=True, metavar="FILE")
    """JSON lines: {"request": the body of a request to POST /v1/search with one query, "hits": the hits that are
    expected}. Hits are objects with an id, best first, as in a response; a response's other fields may stay. --write
    also takes lines without hits."""
    store: str = option("", metavar="STORE")
    """Where the artifacts are: a local folder, or s3://, gs:// or az://bucket/prefix. --url needs none."""
    release: str | None = None
    """Id of the release that answers, in this process; default: the live release of the store. Responses have it, and
    `riptide store list` shows releases/ID."""
    url: str | None = None
    """Send the requests to this server instead of a release of the store, such as http://127.0.0.1:8000. A token comes
    from RIPTIDE_ADMIN_TOKENS or RIPTIDE_USER_TOKENS."""
    max_changed: int = option(0, minimum=0)
    """Number of requests that may return different hits. If there are more, the exit status is 1."""
    OUTPUT: ClassVar = Heading("output")
    write: str | None = option(None, metavar="FILE")
    """Also write the requests with the current hits to this file, which a later replay expects. With it, the exit
    status is 0."""
    overwrite: bool = False
    """Replace the file of --write if it has other content."""
    limit: int | None = option(None, minimum=1)
    """Send the first N requests."""


class SavedRequest(NamedTuple):
    """A request of a file.

    Attributes:
        line: Number of its line, from 1.
        body: The fields of the request, as they are in the file.
        request: The request without the fields of UNSENT.
        expected: Ids of the expected hits, best first; None: the line has no hits.
        raised_settings: nprobe or ef_search of the search for the expected hits, by source, where they were not those
            of the index.
    """

    line: int
    body: dict[str, Any]
    request: SearchRequest
    expected: list[str] | None
    raised_settings: dict[str, int]


class Answer(NamedTuple):
    """The answer to a request.

    Attributes:
        release: Id of the release that answered.
        hits: Ids of the hits, best first.
        raised_settings: As in the response.
    """

    release: str
    hits: list[str]
    raised_settings: dict[str, int]


class ReplayedRequest(NamedTuple):
    """A request with its current hits.

    Attributes:
        line: Number of its line, from 1.
        request: The fields of the request, as they are in the file.
        hits: Ids of the current hits, best first.
        verdict: How they differ from the expected hits; None: the line has no hits.
        difference: The ids that differ, in words; "" if none does.
    """

    line: int
    request: dict[str, Any]
    hits: list[str]
    verdict: Verdict | None
    difference: str


@dataclass(frozen=True)
class Replayed:
    """The requests of a file and their current hits.

    Attributes:
        release: Id of the release that answered.
        requests: The requests, in the order of the file.
    """

    release: str
    requests: tuple[ReplayedRequest, ...]

    @property
    def changed(self) -> list[ReplayedRequest]:
        """The requests whose hits are not the expected ones."""
        return [each for each in self.requests if each.verdict in ("moved", "lost")]

    @property
    def summary(self) -> str:
        """The release and the number of requests by verdict, in a line."""
        line = f"release {self.release}: {len(self.requests):,} requests"
        counts = Counter(each.verdict for each in self.requests if each.verdict is not None)
        if counts:
            line += f", {counts['equal']:,} equal, {counts['moved']:,} with moved hits"
            line += f", {counts['lost']:,} with lost hits"
        return line


def main(options: Replay) -> None:
    saved, release = open_replay(options)
    if options.plan:
        say(f"requests  {len(saved):,} of {options.requests}")
        say(f"server    {options.url}" if release is None else f"release   {release.id}")
        return
    replayed = replay(options, saved, release)
    if options.write:
        say(replayed.summary, options.write)
    elif len(replayed.changed) > options.max_changed:
        exit_with_error(f"{replayed.summary}; expected at most {Parameter('max_changed', options.max_changed)}", 1)
    else:
        say(replayed.summary)


def open_replay(options: Replay) -> tuple[list[SavedRequest], Release | None]:
    """Returns the requests of the file and the release that answers them; None: the server of `url` answers.

    Raises:
        InputError: If the options do not name either a store or a server, or for a file or a release that is missing
            or malformed.
    """
    if bool(options.store) == bool(options.url):
        raise InputError(f"expected one of {Parameter('store', 'STORE')} and {Parameter('url', 'URL')}")
    if options.url and options.release:
        raise InputError(
            f"{Parameter('release', options.release)} with {Parameter('url', options.url)}: a server answers by its "
            f"live release; give {Parameter('store')} instead of {Parameter('url')}"
        )
    saved = read_requests(options.requests, options.limit, needs_hits=options.write is None)
    if options.write:
        check_result_file(options.write, overwrite=options.overwrite)
    if options.url:
        return saved, None
    return saved, open_release(Store(options.store).require_not_empty(), options.release)


def replay(options: Replay, saved: Sequence[SavedRequest], release: Release | None) -> Replayed:
    """Sends requests again, prints those whose hits differ, and writes the file of `write`.

    Args:
        options: The options of the job.
        saved: The requests.
        release: The release that answers; None: the server of `url`.

    Raises:
        InputError: If a request fails, or if another release becomes live; with the file and the line.
    """
    release_id, replayed, rows = "", list[ReplayedRequest](), list[dict[str, Any]]()
    with open_search(options, release) as search:
        for each in saved:
            with line_errors(options.requests, each.line):
                before = release_id
                answer = search(each.request, each.raised_settings)
                release_id, hits = answer.release, answer.hits
                if before not in ("", release_id):
                    raise InputError(
                        f"release {release_id} answers, and release {before} answered the lines before: expected one "
                        "release; replay the requests again"
                    )
            verdict, difference = (None, "") if each.expected is None else compare_ids(each.expected, hits)
            if difference:
                difference += compare_settings(each.raised_settings, answer.raised_settings)
                say(f"line {each.line}: {verdict}: {difference}")
            replayed.append(ReplayedRequest(each.line, each.body, hits, verdict, difference))
            raised = {"raised_settings": answer.raised_settings} if answer.raised_settings else {}
            rows.append({"request": each.body, "release": release_id, **raised, "hits": [{"id": id} for id in hits]})
    if options.write:
        write_files([(options.write, json_lines(rows))], overwrite=options.overwrite)
    return Replayed(release_id, tuple(replayed))


def read_requests(path: str, limit: int | None, *, needs_hits: bool) -> list[SavedRequest]:
    """Reads the requests of a file.

    Args:
        path: The file.
        limit: Maximum number of requests; None: all.
        needs_hits: Whether each line needs the expected hits.

    Raises:
        InputError: For a file without requests, and for the first line that is no request.
    """
    lines, saved = Lines(path), list[SavedRequest]()
    while len(saved) != limit and (piece := lines.take(LINES_AT_ONCE)):
        for number, line in enumerate((piece.data or b"").split(b"\n"), piece.first_line):
            if line.strip():
                with line_errors(path, number):
                    saved.append(_parse_line(number, line, needs_hits))
            if len(saved) == limit:
                break
    if not saved:
        raise InputError(f'{path}: no requests: expected lines such as {{"request": {{"query": "tides", "k": 5}}}}')
    return saved


@contextlib.contextmanager
def line_errors(path: str, line: int) -> Iterator[None]:
    """Context in which the message of an InputError begins with the file and the line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}:{line}: {error}") from error


def _parse_line(number: int, line: bytes, needs_hits: bool) -> SavedRequest:
    """Parses a line. Raises InputError if it is no request with one query, or if it has no hits and needs some."""
    from pydantic import ValidationError

    from riptide.serve.protocol import SearchRequest

    try:
        document = parse_json(line.decode())
    except ValueError as error:
        raise InputError(f"found {short_repr(line.strip())}, expected a JSON object in UTF-8 on one line") from error
    body = document.get("request") if isinstance(document, dict) else None
    if not isinstance(body, dict):
        raise InputError('found no "request": expected {"request": {"query": …}, "hits": [{"id": …}, …]}')
    try:
        request = SearchRequest.model_validate({name: body[name] for name in body.keys() - UNSENT})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("request", *problem["loc"])))
        raise InputError(f"{place}: {problem['msg']}: expected the body of a request to POST /v1/search") from error
    if len(request.texts) != 1:
        raise InputError(
            f"request.queries: {len(request.texts)} queries, expected one in request.query; save one line for each"
        )
    raised_settings = document.get("raised_settings", {})
    if not isinstance(raised_settings, dict) or not all(
        type(value) is int and value >= 1 for value in raised_settings.values()
    ):
        raise InputError(
            f"raised_settings: found {str(raised_settings)[:40]}, expected nprobe or ef_search by source, such as "
            '{"index:minilm": 24}; leave it out for the settings of the builds'
        )
    hits = document.get("hits")
    if hits is None and not needs_hits:
        return SavedRequest(number, body, request, None, raised_settings)
    if not isinstance(hits, list) or not all(isinstance(hit, dict) and isinstance(hit.get("id"), str) for hit in hits):
        raise InputError(
            f'hits: expected a list of objects with an "id"; {Parameter("write", "FILE")} writes a file with the '
            "current hits"
        )
    return SavedRequest(number, body, request, [hit["id"] for hit in hits], raised_settings)


def open_release(store: Store, id: str | None) -> Release:
    """Returns a release of the store; None as `id`: the live one. Raises InputError if it is missing."""
    from riptide.serve.release.live import read_live_release
    from riptide.serve.release.release import Release

    if id is None:
        release, _ = read_live_release(store)
        if release is None:
            raise InputError(f"{store.url}: no release was ever live: {Command('serve-search')} makes one")
        return release
    ids = store.names("releases")
    if id not in ids:
        raise InputError(
            f"{Parameter('release', id)}: {store.url} has no such release; it has {list_first(ids, SHOWN) or 'none'}"
        )
    return Release.load(store, id)


@contextlib.contextmanager
def open_search(options: Replay, release: Release | None) -> Iterator[Search]:
    """Context with a function that searches by a release, in this process, or on the server of --url if it is None."""
    if release is None:
        yield _server_search(options.url or "")
        return
    from riptide.serve.one_process import open_local
    from riptide.serve.service.service_options import ServiceOptions

    with asyncio.Runner() as loop:

        async def start() -> Any:
            service = open_local(
                Store(options.store), ServiceOptions(warm_up_s=0), device="cuda" if num_gpus() else "cpu"
            )
            try:
                with service_errors():
                    await service.serve_release(release)
            except BaseException:
                service.close()
                raise
            return service

        service = loop.run(start())

        async def search(request: SearchRequest, raised_settings: Mapping[str, int]) -> Answer:
            with service_errors():
                live, searched, [(answer, _)] = await service.search(
                    request, TIMEOUT_S, raised_settings=raised_settings
                )
                if answer.error is not None:
                    raise answer.error
            return Answer(live.release.id, [hit.id for hit in answer.hits], searched.raised_settings)

        async def stop() -> None:
            await service.drain()
            service.close()

        try:
            yield lambda request, raised_settings: loop.run(search(request, raised_settings))
        finally:
            loop.run(stop())


@contextlib.contextmanager
def service_errors() -> Iterator[None]:
    """Context that raises the errors of a service as InputError, with the details that a server only logs."""
    from riptide.serve.service_errors import ExpiredError, StoreError, UnknownTaskError

    try:
        yield
    except StoreError as error:
        raise InputError(error.detail or str(error)) from error
    except ExpiredError as error:
        raise InputError(f"the search takes more than {TIMEOUT_S:g} s: give a smaller k or rerank") from error
    except UnknownTaskError as error:
        raise InputError(str(error)) from error


def _server_search(url: str) -> Search:
    """Returns a function that sends requests to a server, and repeats those that it refuses because it is busy.

    The server searches with its own settings.
    """
    from riptide.serve.client import Client, ServerError
    from riptide.serve.http.guard import token_from_environment

    client = Client(url, token=token_from_environment())

    def search(request: SearchRequest, raised_settings: Mapping[str, int]) -> Answer:
        retries = RETRIES
        while True:
            try:
                answer = client.search_response(request.model_dump(exclude_unset=True))
            except ServerError as error:
                wait_s = 1.0 if error.retry_after is None else error.retry_after
                if error.status not in (429, 503) or wait_s > MAX_WAIT_S or not retries:
                    raise InputError(f"{url}: {error}") from error
                retries -= 1
                time.sleep(wait_s)
            else:
                hits = [hit["id"] for hit in answer["results"][0]["hits"]]
                return Answer(answer["release"], hits, answer.get("raised_settings", {}))

    return search


def compare_ids(expected: Sequence[str], actual: Sequence[str]) -> tuple[Verdict, str]:
    """Compares the ids of hits, and describes a difference: "" if they are equal.

    Lost: expected hits are missing. Moved: no hit is lost, but the order differs or there are other hits.
    """
    if list(expected) == list(actual):
        return "equal", ""
    ranks = {id: rank for rank, id in enumerate(actual, 1)}
    if missing := [id for id in expected if id not in ranks]:
        return "lost", list_first(missing, SHOWN)
    moved = [f"{id} {old} -> {ranks[id]}" for old, id in enumerate(expected, 1) if ranks[id] != old]
    expected_ids = set(expected)
    new = [id for id in actual if id not in expected_ids]
    changes = [list_first(moved, SHOWN), f"new {list_first(new, SHOWN)}" if new else ""]
    return "moved", "; ".join(filter(None, changes))


def compare_settings(expected: Mapping[str, int], actual: Mapping[str, int]) -> str:
    """Describes the raised settings of two searches, after those of hits; "" if they are equal."""
    if expected == actual:
        return ""
    texts = (", ".join(f"{source} {value}" for source, value in each.items()) or "none" for each in (expected, actual))
    return "; raised settings (nprobe, ef_search): {}, now {}".format(*texts)


if __name__ == "__main__":
    run(main, Replay)

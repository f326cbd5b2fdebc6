"""What several tests of reports need."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Posts = list[tuple[str, dict[str, Any]]]  # Any: JSON


@pytest.fixture
def server() -> Iterator[tuple[str, Posts]]:
    """Serve on a port; give its URL, and what is posted there: authorization and content."""
    posts: Posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append((self.headers["Authorization"], json.loads(body)))
            if self.path == "/garbage":
                self.wfile.write(b"what is this")
                return
            self.send_response(422 if self.path == "/refused" else 200)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", posts
        served.shutdown()
        thread.join()

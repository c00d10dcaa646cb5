"""A bank that books a transfer, then answers 402 or 502. It knows no keys, but can be asked. `python bank.py [PORT]`"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ANSWERS = {"o-402": 402, "o-502": 502}  # what is answered for an order; everything else gets 201
transfers: list[dict[str, object]] = []


class Bank(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        transfers.append({"id": f"tr_{len(transfers) + 1}", **call})
        status = ANSWERS.get(call["order"], 201)
        self.answer(status, transfers[-1] if status == 201 else {"error": "try again later"})

    def do_GET(self) -> None:
        wanted = parse_qs(urlsplit(self.path).query).get("order", [""])[0]
        self.answer(200, {"data": [each for each in transfers if each["order"] == wanted]})

    def answer(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9101), Bank)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()

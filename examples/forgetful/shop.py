"""A shop that knows a key again for three seconds only. `python shop.py [PORT]`

The order `o-flaky` is charged, and its first answer is 502; of `o-down` the answer is 502 for five seconds.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MEMORY_S = 3.0
known: dict[str, tuple[float, dict[str, str]]] = {}
charges: list[dict[str, str]] = []
first_s: dict[str, float] = {}


class Shop(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
        key, now = self.headers["Idempotency-Key"], time.monotonic()
        if key not in known or now - known[key][0] > MEMORY_S:
            charges.append({"id": f"ch_{len(charges) + 1}", "order": order})
            known[key] = (now, charges[-1])
        is_first = order not in first_s
        since_s = now - first_s.setdefault(order, now)
        fails = (order == "o-flaky" and is_first) or (order == "o-down" and since_s < 5)
        self.answer(502, {"error": "bad gateway"}) if fails else self.answer(200, known[key][1])

    def do_GET(self) -> None:
        self.answer(200, charges)

    def answer(self, status: int, body: object) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 9102), Shop)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()

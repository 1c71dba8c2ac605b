import http.server
import json

settings = json.load(open("/app/settings.json"))


class Prices(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        shell = self.path.strip("/")
        known = settings["prices"]
        self.send_response(200 if shell in known else 404)
        self.end_headers()
        self.wfile.write(str(known.get(shell, "unknown")).encode())

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", settings["port"]), Prices).serve_forever()

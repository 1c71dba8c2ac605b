"""Runs inside a sandbox: contexts in which code is run piece by piece, over HTTP, as E2B's code interpreter has them.

``python3 code_server.py [--port 49999]``.

::

    POST /execute {code, context_id, language, env_vars} ▸ lines of JSON: stdout, stderr, result, error, their end
    POST, GET /contexts, DELETE /contexts/ID, POST /contexts/ID/restart, GET /health

An execution whose client leaves is interrupted as by Ctrl-C. Python keeps variables between executions; bash does not.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 49999
MAX_BODY = 64 << 20
READY = 0.5  # seconds between two looks whether the client is still there
FORMS = {
    "html": "_repr_html_",
    "markdown": "_repr_markdown_",
    "svg": "_repr_svg_",
    "png": "_repr_png_",
    "jpeg": "_repr_jpeg_",
    "latex": "_repr_latex_",
    "json": "_repr_json_",
    "javascript": "_repr_javascript_",
}
PYTHON = ("python", "python3", "py", None, "")
SHELL = ("bash", "sh", "shell")


# --------------------------------------------------------------------------- within a context


def shown(value, main):
    """What is given out of a value: its text, and each form in which it can show itself."""
    result = {"type": "result", "text": repr(value), "is_main_result": main}
    for name, method in FORMS.items():
        made = None
        with contextlib.suppress(Exception):  # a value that cannot show itself so
            made = getattr(value, method)()
        if isinstance(made, tuple):
            made = made[0]
        if isinstance(made, bytes):
            made = base64.b64encode(made).decode()
        if made is not None:
            result[name] = made
    return result


def charts():
    """Charts that were drawn, if matplotlib is in use."""
    plots = sys.modules.get("matplotlib.pyplot")
    for number in plots.get_fignums() if plots else ():
        buffer = io.BytesIO()
        plots.figure(number).savefig(buffer, format="png")
        yield {
            "type": "result",
            "text": repr(plots.figure(number)),
            "png": base64.b64encode(buffer.getvalue()).decode(),
            "is_main_result": False,
        }
    if plots:
        plots.close("all")


def lines_for_shell(code):
    """``!command`` and ``%pip`` become calls, as in a notebook."""
    made = []
    for line in code.splitlines():
        bare = line.lstrip()
        if bare.startswith(("!", "%pip ")):
            command = bare[1:] if bare[0] == "!" else f"{sys.executable} -m pip {bare[5:]}"
            made.append(line[: len(line) - len(bare)] + f"__shell__({command!r})")
        else:
            made.append(line)
    return "\n".join(made)


def context_main():
    """The process of one context: a piece of code on each line of stdin, what came of it on descriptor 3."""
    os.set_inheritable(3, False)
    out = os.fdopen(3, "w", buffering=1)
    sys.stdout.reconfigure(line_buffering=True)
    names = {"__name__": "__main__", "__builtins__": __builtins__}

    def give(value):
        out.write(json.dumps(value, default=str) + "\n")

    def display(*values):
        for value in values:
            give(shown(value, False))

    def shell(command):
        subprocess.run(
            command, shell=True, check=False, executable="/bin/bash" if os.path.exists("/bin/bash") else None
        )

    names["display"], names["__shell__"] = display, shell
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # but while code runs
    count = 0
    for line in requests:
        request, count = json.loads(line), count + 1
        give({"type": "number_of_executions", "execution_count": count})
        before = dict(os.environ)
        os.environ.update(request.get("env_vars") or {})
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            tree = ast.parse(lines_for_shell(request["code"]), "<code>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
                if value is not None:
                    names["_"] = value
                    give(shown(value, True))
            for chart in charts():
                give(chart)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is given out, and the context stays
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            reported = {"type": "error", "name": type(error).__name__, "value": str(error), "traceback": text}
            if reported["name"] == "FinalAnswerException":  # of smolagents: its value is the answer
                reported["final"] = getattr(error, "value", None)
            give(reported)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.environ.clear()
            os.environ.update(before)
            sys.stdout.flush()
            sys.stderr.flush()
            give({"type": "end_of_execution"})


# --------------------------------------------------------------------------- the server


class Context:
    """A process with variables. One execution at a time."""

    def __init__(self, language, cwd):
        self.id, self.language, self.cwd = str(uuid.uuid4()), language, cwd
        self.lock = threading.Lock()
        self.process = None

    def brief(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def start(self):
        reading, writing = os.pipe()
        out, err = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import os; os.dup2({writing}, 3); os.execv({sys.executable!r}, {self._words()!r})",
            ],
            stdin=subprocess.PIPE,
            stdout=out[1],
            stderr=err[1],
            pass_fds=[writing],
            cwd=self.cwd,
            start_new_session=True,
        )
        for number in (writing, out[1], err[1]):
            os.close(number)
        self.outputs = {"stdout": out[0], "stderr": err[0], "": reading}
        self.rest = b""

    @staticmethod
    def _words():
        return [sys.executable, os.path.abspath(__file__), "--context"]

    def stop(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for number in self.outputs.values():
                os.close(number)
            self.process = None

    def execute(self, code, env, put, left):
        """Put each line of what comes of it. `left()`: whether the client has gone."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self.start()
            self.process.stdin.write(json.dumps({"code": code, "env_vars": env}).encode() + b"\n")
            self.process.stdin.flush()
            interrupted = False
            while True:
                readable, _, _ = select.select(list(self.outputs.values()), [], [], READY)
                ended = self._pass(readable, put)
                if ended is not None:
                    break
                if not interrupted and left():
                    interrupted = True
                    os.killpg(self.process.pid, signal.SIGINT)
            if not ended:
                status = f"the process of the context ended with {self.process.wait()}"
                put({"type": "error", "name": "ContextDied", "value": status, "traceback": status})
                put({"type": "end_of_execution"})

    def _pass(self, readable, put):
        """Put what has come, outputs before results. True: the execution has ended; False: the context has died."""
        for name in ("stdout", "stderr"):
            while select.select([self.outputs[name]], [], [], 0)[0]:
                data = os.read(self.outputs[name], 1 << 16)
                if not data:
                    break
                put({"type": name, "text": data.decode(errors="replace"), "timestamp": time.time_ns()})
        if self.outputs[""] not in readable:
            return None
        if not (data := os.read(self.outputs[""], 1 << 20)):
            return False
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        values = [json.loads(line) for line in lines]
        ended = any(value["type"] == "end_of_execution" for value in values)
        if ended:  # what it printed last came before its end
            self._pass([], put)
        for value in values:
            put(value)
        return ended or None


class Contexts:
    def __init__(self):
        self.every, self.default, self.lock = {}, None, threading.Lock()

    def make(self, language="python", cwd=None):
        if language not in PYTHON:
            raise LookupError(f"contexts are of python alone, not of {language}")
        with self.lock:
            home = os.path.expanduser("~")
            made = Context("python", cwd or (home if os.path.isdir(home) else "/"))
            self.every[made.id] = made
            return made

    def of(self, number):
        if number:
            if number not in self.every:
                raise LookupError(f"Context {number} not found")
            return self.every[number]
        if self.default not in self.every:
            self.default = self.make().id
        return self.every[self.default]


CONTEXTS = Contexts()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, status, value=None):
        raw = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def body(self):
        size = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(min(size, MAX_BODY)) or b"{}")

    def route(self):
        parts = self.path.strip("/").split("/")
        try:
            if self.command == "GET" and parts == ["health"]:
                self.answer(200, "OK")
            elif self.command == "GET" and parts == ["contexts"]:
                self.answer(200, [context.brief() for context in list(CONTEXTS.every.values())])
            elif self.command == "POST" and parts == ["contexts"]:
                target = self.body()
                self.answer(200, CONTEXTS.make(target.get("language") or "python", target.get("cwd")).brief())
            elif self.command == "POST" and len(parts) == 3 and parts[2] == "restart":
                CONTEXTS.of(parts[1]).stop()
                self.answer(200, {})
            elif self.command == "DELETE" and len(parts) == 2:
                CONTEXTS.of(parts[1]).stop()
                CONTEXTS.every.pop(parts[1])
                self.answer(204)
            elif self.command == "POST" and parts == ["execute"]:
                self.execute(self.body())
            else:
                self.answer(404, {"message": "no such path"})
        except LookupError as error:
            self.answer(404, {"message": str(error.args[0])})

    do_GET = do_POST = do_DELETE = route

    def execute(self, target):
        language = target.get("language")
        if language in SHELL:
            run = self.shell
        elif language in PYTHON:
            context = CONTEXTS.of(target.get("context_id"))
            run = context.execute
        else:
            raise LookupError(f"{language} is not run here: python and bash are")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        run(target["code"], target.get("env_vars") or {}, self.put, self.left)
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def put(self, value):
        raw = json.dumps(value).encode() + b"\n"
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            self.wfile.flush()

    def left(self):
        """A client that has left has closed its end; one that waits sends nothing."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, 2)  # MSG_PEEK

    def shell(self, code, env, put, left):
        done = subprocess.Popen(
            ["/bin/bash", "-c", code],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        streams = {done.stdout.fileno(): "stdout", done.stderr.fileno(): "stderr"}
        while streams:
            readable, _, _ = select.select(list(streams), [], [], READY)
            for number in readable:
                if data := os.read(number, 1 << 16):
                    put({"type": streams[number], "text": data.decode(errors="replace"), "timestamp": time.time_ns()})
                else:
                    del streams[number]
            if left():
                os.killpg(done.pid, signal.SIGKILL)
        if done.wait() != 0:
            text = f"the command ended with {done.returncode}"
            put({"type": "error", "name": "CommandFailed", "value": text, "traceback": text})
        put({"type": "end_of_execution"})


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--port", type=int, default=PORT)
    words.add_argument("--context", action="store_true")
    options = words.parse_args()
    if options.context:
        context_main()
    else:
        CONTEXTS.of(None)
        ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

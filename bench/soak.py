#!/usr/bin/env python3
"""Runs two servers under full load for minutes or hours and checks that nothing grows.

One server keeps its clients in memory and gets new ones all the time. The other uses a Redis that is killed and restarted at
intervals. Both get load over HTTP (wrk) and RESP (redis-benchmark); connections open and close; the configuration is
reloaded every second, sometimes with an error in it; one policy has leases. Every two seconds the script samples resident memory, descriptors, and
the latency of a client that sends fifty requests per second. `scripts/soak` starts this script. The last line of the output
is the verdict; the exit code is 1 if a check failed.
"""

import argparse, http.client, os, pathlib, re, signal, socket, statistics, subprocess, sys, tempfile, threading, time

SAMPLE_EVERY_S = 2.0
OUTAGE_S = 2.0
COLORS = {"p50": "#0969da", "p99": "#cf222e", "value": "#0969da"}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def configuration(turn):
    if turn % 7 == 6:
        return "[policies.api]\nlimt = 5\n"
    return f"""
[admin]
loopback = true
[policies.api]
limit = {1000 + turn % 50}
window = "1m"
on_store_error = "local"
instances = 2
[policies.api.tiers.pro]
limit = {5000 + turn % 50}
[policies.log]
algorithm = "sliding_window_log"
limit = 20
window = "1s"
on_store_error = "local"
instances = 2
[policies.leased]
limit = 5000
window = "1s"
on_store_error = "local"
instances = 2
lease = "500ms"
[policies.good]
limit = 100000
window = "1s"
on_store_error = "local"
instances = 2
"""


class WatchedServer:
    """A server and its samples."""

    def __init__(self, name, binary, folder, options, keys):
        self.name, self.keys, self.folder = name, keys, folder
        self.config = folder / f"{name}.toml"
        self.config.write_text(configuration(0))
        self.log = open(folder / f"{name}.log", "w")
        self.process = subprocess.Popen(
            [binary, "serve", "--config", self.config, "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--log", "error", *options],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        addresses = dict(self.process.stdout.readline().split(maxsplit=1) for _ in range(3))
        self.http, self.resp = addresses["http"].strip(), addresses["resp"].strip()
        self.samples, self.waits, self.errors = [], [], []
        self.lock = threading.Lock()
        self.reloads = 0

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def decisions(self):
        connection = http.client.HTTPConnection(self.http, timeout=20)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return sum(int(number) for number in re.findall(r"^tallygate_decisions_total\{.*\} (\d+)$", text, re.M)), sum(
            int(number) for number in re.findall(r'^tallygate_decisions_total\{.*source="lease".*\} (\d+)$', text, re.M))

    def send_regular_requests(self, stop):
        """Sends fifty requests per second and records their latency."""
        host, port = self.resp.split(":")
        stream = socket.create_connection((host, int(port)), timeout=20)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        replies = stream.makefile("rb")
        while not stop.is_set():
            began = time.perf_counter()
            stream.sendall(b"TG.CHECK good me\r\n")
            reply = [replies.readline() for _ in range(7)]
            took = time.perf_counter() - began
            with self.lock:
                self.waits.append(took)
                if reply[0] != b"*6\r\n" or reply[1] != b":1\r\n":
                    self.errors.append(repr(reply))
            stop.wait(0.02)
        stream.close()

    def open_and_close_connections(self, stop):
        """Opens connections that send a whole request, a part of one, or nothing, and closes them."""
        requests = [
            (self.resp, b"TG.CHECK api me\r\n"),
            (self.resp, b"*3\r\n$8\r\nTG.CHECK\r\n$3\r\nap"),
            (self.http, b"GET /v1/authorize/api HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
            (self.http, b"POST /v1/check HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"),
            (self.http, b""),
        ]
        turn = 0
        while not stop.is_set():
            address, request = requests[turn % len(requests)]
            turn += 1
            try:
                host, port = address.split(":")
                with socket.create_connection((host, int(port)), timeout=20) as stream:
                    stream.sendall(request)
                    stream.shutdown(socket.SHUT_WR)
                    while stream.recv(65536):
                        pass
            except OSError as error:
                # The server may reset a connection that closes in the middle of a request.
                if not isinstance(error, (ConnectionResetError, BrokenPipeError)):
                    with self.lock:
                        self.errors.append(f"connection failed: {error}")
            stop.wait(0.005)

    def reload(self, stop):
        turn = 0
        while not stop.wait(1.0):
            turn += 1
            written = self.config.with_suffix(".new")
            written.write_text(configuration(turn))
            written.rename(self.config)
            connection = http.client.HTTPConnection(self.http, timeout=20)
            connection.request("POST", "/v1/admin/reload")
            status = connection.getresponse().status
            connection.close()
            if (status < 300) == (turn % 7 == 6):
                with self.lock:
                    self.errors.append(f"a reload returned status {status}")
            self.reloads += 1

    def load(self):
        lua = self.folder / f"{self.name}.lua"
        lua.write_text(f"""
math.randomseed(7)
wrk.method = "POST"
request = function()
    return wrk.format(nil, "/v1/check", nil, '{{"policy":"api","key":"h' .. math.random({self.keys}) .. '"}}')
end
""")
        port = self.resp.split(":")[1]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        wrk = ["wrk", "-t1", "-c20", "-d100h", "-s", str(lua), f"http://{self.http}"]
        throttle = ["redis-benchmark", "-p", port, "-l", "-q", "-c", "10", "-P", "16", "-r", str(self.keys),
                    "CL.THROTTLE", "t__rand_int__", "100", "1000", "60"]
        log = ["redis-benchmark", "-p", port, "-l", "-q", "-c", "5", "-P", "4", "-r", str(self.keys),
               "TG.CHECK", "log", "l__rand_int__"]
        # Few keys, so that each is leased all the time.
        leased = ["redis-benchmark", "-p", port, "-l", "-q", "-c", "5", "-P", "4", "-r", "20",
                  "TG.CHECK", "leased", "k__rand_int__"]
        return [subprocess.Popen(command, **quiet) for command in (wrk, throttle, log, leased)]

    def sample(self, seconds):
        with self.lock:
            waits, self.waits = sorted(self.waits), []
        at = lambda share: 1000 * waits[min(len(waits) - 1, int(share * len(waits)))] if waits else float("nan")
        self.samples.append((seconds, self.resident(), self.descriptors(), at(0.5), at(0.99)))


class Redis:
    """A Redis server that is killed and restarted at intervals."""

    def __init__(self, folder):
        self.port, self.folder, self.restarts = free_port(), folder, 0
        self.start()

    def start(self):
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                   "--dir", str(self.folder), "--maxmemory-policy", "noeviction"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        sys.exit("redis-server did not start")

    def fail_at_intervals(self, every, stop):
        while not stop.wait(every):
            self.process.kill()
            self.process.wait()
            stop.wait(OUTAGE_S)
            self.start()
            self.restarts += 1


def slope(points):
    """Returns the least-squares slope, per second."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def svg(servers, minutes):
    width, height, left, top, gap = 360, 150, 60, 50, 60
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 700" font-family="sans-serif" font-size="12">',
           "<style>text{fill:#57606a}line{stroke:#d0d7de}@media(prefers-color-scheme:dark)"
           "{text{fill:#9da7b1}line{stroke:#3d444d}}</style>",
           f'<text x="{left}" y="20" font-size="14">Under full load for {minutes:g} minutes</text>']
    rows = [("resident memory, MiB", [("value", 1)]), ("descriptors", [("value", 2)]),
            ("latency of a regular client, ms", [("p50", 3), ("p99", 4)])]
    for column, server in enumerate(servers):
        for row, (title, curves) in enumerate(rows):
            x0, y0 = left + column * (width + 80), top + row * (height + gap)
            values = [sample[index] for _, index in curves for sample in server.samples if sample[index] == sample[index]]
            most = max(values) * 1.1 or 1
            longest = server.samples[-1][0] or 1
            out.append(f'<text x="{x0}" y="{y0 - 8}">{server.name}: {title}</text>')
            for part in range(5):
                y = y0 + height * part / 4
                label = most * (4 - part) / 4
                out.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
                           f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{label:.3g}</text>')
            for name, index in curves:
                points = " ".join(f"{x0 + width * s[0] / longest:.1f},{y0 + height * (1 - s[index] / most):.1f}"
                                  for s in server.samples if s[index] == s[index])
                out.append(f'<polyline fill="none" stroke="{COLORS[name]}" stroke-width="1.2" points="{points}"/>')
                if name != "value":
                    x = x0 + width - (40 if name == "p50" else 8)
                    out.append(f'<text x="{x}" y="{y0 - 8}" text-anchor="end" style="fill:{COLORS[name]}">{name}</text>')
            out.append(f'<text x="{x0 + width}" y="{y0 + height + 16}" text-anchor="end">{longest / 60:.1f} min</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("minutes", type=float)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--into", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    stop, loads, threads, problems = threading.Event(), [], [], []
    lines = []

    def report(line=""):
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        redis = Redis(folder)
        servers = []
        try:
            servers.append(WatchedServer("memory", arguments.binary, folder, ["--max-keys", "1000000"], 5_000_000))
            servers.append(WatchedServer("redis", arguments.binary, folder, ["--store", f"redis://127.0.0.1:{redis.port}"], 100_000))
            idle_descriptors = [server.descriptors() for server in servers]
            for server in servers:
                for work in (server.send_regular_requests, server.open_and_close_connections, server.reload):
                    threads.append(threading.Thread(target=work, args=(stop,), daemon=True))
                loads += server.load()
            # During each outage the server stores clients itself, until it reaches its maximum: that is the warm-up.
            every = max(10.0, min(45.0, arguments.minutes * 60 / 12))
            threads.append(threading.Thread(target=redis.fail_at_intervals, args=(every, stop), daemon=True))
            for thread in threads:
                thread.start()
            began = time.monotonic()
            while (seconds := time.monotonic() - began) < arguments.minutes * 60:
                for server in servers:
                    if server.process.poll() is not None:
                        problems.append(f"{server.name} ended with {server.process.returncode}")
                    else:
                        server.sample(seconds)
                if problems:
                    break
                time.sleep(SAMPLE_EVERY_S)
            stop.set()
            for load in loads:
                load.send_signal(signal.SIGTERM)
                load.wait()
            for thread in threads:
                thread.join(30)
            report(f"{arguments.minutes:g} minutes on {os.cpu_count()} cores, shared by load and servers; Redis was killed {redis.restarts} times.")
            report()
            report("| | memory | redis |")
            report("|---|---|---|")
            table = {name: [] for name in ("decisions", "decided by leases", "reloads", "resident MiB: after the warm-up, at the end",
                     "slope after the warm-up, MiB per hour", "descriptors: before, maximum, after",
                     "latency of a regular client, ms: p50, p99 (medians of all samples)", "errors")}
            for server, before in zip(servers, idle_descriptors):
                if server.process.poll() is not None:
                    continue
                deadline = time.monotonic() + 15
                # Closed connections disappear within a moment; connections to Redis stay open.
                while server.descriptors() > before + 4 and time.monotonic() < deadline:
                    time.sleep(0.1)
                after = server.descriptors()
                decisions, leased = server.decisions()
                if server.name == "redis" and not leased:
                    problems.append("redis: nothing was decided by a lease")
                count = len(server.samples)
                steady = server.samples[int(0.4 * count):]
                early = statistics.fmean(s[1] for s in server.samples[int(0.4 * count):max(int(0.6 * count), int(0.4 * count) + 1)])
                late = statistics.fmean(s[1] for s in server.samples[int(0.8 * count):])
                growth = slope([(s[0], s[1]) for s in steady]) * 3600
                p50 = statistics.median(s[3] for s in server.samples if s[3] == s[3])
                p99 = statistics.median(s[4] for s in server.samples if s[4] == s[4])
                for name, value in zip(table, (
                        f"{decisions:,}", f"{leased:,}", f"{server.reloads:,}", f"{early:.1f}, {late:.1f}", f"{growth:+.1f}",
                        f"{before}, {max(s[2] for s in server.samples)}, {after}", f"{p50:.2f}, {p99:.2f}", str(len(server.errors)))):
                    table[name].append(value)
                if late > early + max(2.0, 0.03 * early):
                    problems.append(f"{server.name}: memory grew from {early:.1f} to {late:.1f} MiB")
                if after > before + 4:
                    problems.append(f"{server.name}: {after} descriptors are open, {before} before the load")
                if server.errors:
                    problems.append(f"{server.name}: {len(server.errors)} errors, the first is {server.errors[0]}")
                server.process.terminate()
                if (code := server.process.wait(30)) != 0:
                    problems.append(f"{server.name} exited with {code}")
                server.log.flush()
                logged = pathlib.Path(server.log.name).read_text()
                if "panicked" in logged:
                    problems.append(f"{server.name} panicked: {logged[logged.index('panicked'):][:300]}")
            for name, values in table.items():
                report(f"| {name} | {' | '.join(values)} |")
            report()
            for problem in problems:
                report(f"- {problem}")
            report("The soak failed." if problems else "The soak passed: memory is flat, descriptors were released, every reply was correct.")
            arguments.into.mkdir(parents=True, exist_ok=True)
            (arguments.into / "soak.svg").write_text(svg(servers, arguments.minutes))
            heading = ["# Soak test", "", "`scripts/soak` runs two servers under full load: one keeps clients in memory and gets new ones all",
                       "the time, the other uses a Redis that is killed and restarted at intervals. Its output:", "", "![Memory, descriptors and latency](soak.svg)", ""]
            (arguments.into / "soak.md").write_text("\n".join(heading + lines + [""]))
        finally:
            stop.set()
            for process in loads + [server.process for server in servers] + [redis.process]:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    sys.exit(1 if problems else 0)


main()

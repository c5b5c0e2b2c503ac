#!/usr/bin/env bash
# Compares the server with rivals in one run: RESP with redis-benchmark, HTTP with wrk, 50 connections each, 100 000 random
# keys, every request allowed. The best of three interleaved rounds counts.
#
#   resp-p1, resp-p16   CL.THROTTLE, one or sixteen commands in flight per connection
#   http                POST /v1/check
#
# The last column is the processor time of the server per request. Unlike the rate, it does not depend on what else the
# machine does.
#
# Rivals: redis-server with PING (makes no decision) and with SET key value EX 60 (a command of the same length that
# writes); redis-cell as a module of redis-server; throttlecrab-server (RESP and HTTP). The last two are built from the
# crate registry into target/rivals if they are missing; with BENCH_NO_RIVALS they are left out instead.
set -euo pipefail
cd "$(dirname "$0")/.."

requests=${BENCH_REQUESTS:-1000000}
rounds=${BENCH_ROUNDS:-3}
seconds=${BENCH_SECONDS:-5}
work=$(mktemp -d)
pids=()
stop() { for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true; rm -rf "$work"; }
trap stop EXIT

has() { command -v "$1" >/dev/null 2>&1; }
# Installs the packages of a command if it is missing and this script runs as root.
need() { has "$1" || { [ "$(id -u)" -eq 0 ] && apt-get install -y -qq "${@:2}" >/dev/null; } || true; }
need wrk wrk
need redis-server redis-server
need redis-benchmark redis-tools

cell=target/rivals/redis-cell
[ -f $cell.so ] || [ -n "${BENCH_NO_RIVALS-}" ] || {
    # A library: cargo builds it only as a dependency of a package.
    mkdir -p $cell/src
    printf '[package]\nname = "rival"\nversion = "0.0.0"\nedition = "2024"\n[dependencies]\nredis-cell = "0.2.2"\n[workspace]\n' \
        >$cell/Cargo.toml
    : >$cell/src/lib.rs
    cargo build -q --release --manifest-path $cell/Cargo.toml --target-dir $cell/target >&2 &&
        cp $cell/target/release/libredis_cell.so $cell.so
} || true

cargo build -q --locked --release
target/release/tallygate serve --http 127.0.0.1:0 --resp 127.0.0.1:0 --log error --config bench/server.toml >"$work/tallygate" &
pids+=($!)
tallygate_pid=$!
until grep -q '^tallygate ready' "$work/tallygate"; do sleep 0.05; done
tallygate_http=$(sed -n 's/^http //p' "$work/tallygate")
tallygate_resp=$(sed -n 's/^resp .*://p' "$work/tallygate")

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
# Waits until a process answers on its port.
answers() { until redis-cli -p "$2" ping >/dev/null 2>&1; do kill -0 "$1" && sleep 0.05; done; }
redis_port=$(free_port)
# The module links Rust's standard library dynamically.
LD_LIBRARY_PATH=$(rustc --print target-libdir) redis-server --port "$redis_port" --bind 127.0.0.1 --save "" --appendonly no \
    $([ ! -f $cell.so ] || echo --loadmodule "$PWD/$cell.so") >/dev/null &
pids+=($!)
redis_pid=$!
answers $! "$redis_port"

crab=target/rivals/bin/throttlecrab-server
[ -x $crab ] || [ -n "${BENCH_NO_RIVALS-}" ] || {
    need protoc protobuf-compiler libprotobuf-dev
    cargo install -q --root target/rivals throttlecrab-server >&2
} || true
if [ -x $crab ]; then
    crab_resp=$(free_port) crab_http=$(free_port)
    $crab --redis --redis-host 127.0.0.1 --redis-port "$crab_resp" --http --http-host 127.0.0.1 \
        --http-port "$crab_http" --log-level error >/dev/null 2>&1 &
    pids+=($!)
    crab_pid=$!
    answers $! "$crab_resp"
fi

throttle=(CL.THROTTLE key:__rand_int__ 1000000 1000000 60)
# Prints the port and the command for a RESP entrant.
entrant() {
    case $1 in
    tallygate) echo "$tallygate_resp" "${throttle[@]}" ;;
    redis-ping) echo "$redis_port" PING ;;
    redis-set-ex) echo "$redis_port" SET set:__rand_int__ value EX 60 ;;
    redis-cell) [ ! -f $cell.so ] || echo "$redis_port" "${throttle[@]}" ;;
    throttlecrab) [ ! -x $crab ] || echo "$crab_resp" THROTTLE key:__rand_int__ 1000000 1000000 60 ;;
    esac
}

# Prints the processor time that an entrant has used, in ms.
processor_time() {
    local pid=$redis_pid
    case $1 in
    tallygate) pid=$tallygate_pid ;;
    throttlecrab) pid=$crab_pid ;;
    esac
    awk -v per_second="$(getconf CLK_TCK)" '{ print int(($14 + $15) * 1000 / per_second) }' "/proc/$pid/stat"
}

# Prints requests per second, p99 in ms, and the number of requests.
resp() {
    local pipeline=$1 count=$2 port=$3
    shift 3
    redis-benchmark -p "$port" -c 50 -n "$count" -P "$pipeline" -r 100000 --csv "$@" 2>/dev/null |
        tail -n 1 | awk -F'","' -v count="$count" '{ print $2, $7, count }'
}

cat >"$work/check.lua" <<'LUA'
math.randomseed(os.time())
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
request = function()
    return wrk.format(nil, path, nil, string.format(body, math.random(100000)))
end
LUA
http() {
    local address=$1 path=$2 body=$3
    { printf 'path = "%s"\nbody = [[%s]]\n' "$path" "$body"; cat "$work/check.lua"; } >"$work/this.lua"
    wrk -t 2 -c 50 -d "${seconds}s" --latency -s "$work/this.lua" "http://$address" 2>/dev/null |
        awk '/Requests\/sec/ { rate = $2 } $1 == "99%" { p99 = $2 } / requests in / { count = $1 } END { print rate, p99, count }'
}

printf '%-10s %-14s %12s %12s %16s\n' case entrant requests/s p99 'µs of processor'
for case in resp-p1 resp-p16 http; do
    declare -A best=() tail=() cost=()
    for _ in $(seq "$rounds"); do
        for name in tallygate redis-ping redis-set-ex redis-cell throttlecrab; do
            [ $name != throttlecrab ] || [ -x $crab ] || continue
            used=$(processor_time $name)
            if [ $case = http ]; then
                case $name in
                tallygate) result=$(http "$tallygate_http" /v1/check '{"policy":"bench","key":"key:%d"}') ;;
                throttlecrab)
                    result=$(http "127.0.0.1:$crab_http" /throttle \
                        '{"key":"key:%d","max_burst":1000000,"count_per_period":1000000,"period":60}')
                    ;;
                *) continue ;;
                esac
            else
                read -ra command <<<"$(entrant $name)"
                [ ${#command[@]} -gt 0 ] || continue
                pipeline=${case#resp-p} count=$requests
                [ "$pipeline" -gt 1 ] || count=$((requests / 5))
                # Slow entrants get fewer requests.
                [ $name != throttlecrab ] || count=$((count / 10))
                result=$(resp "$pipeline" "$count" "${command[@]}")
            fi
            read -r rate p99 count <<<"$result"
            if awk "BEGIN { exit !(${rate:-0} > ${best[$name]:-0}) }"; then
                best[$name]=$rate tail[$name]=$p99
                cost[$name]=$(awk "BEGIN { printf \"%.2f\", ($(processor_time $name) - $used) * 1000 / $count }")
            fi
        done
    done
    for name in tallygate redis-ping redis-set-ex redis-cell throttlecrab; do
        [ -n "${best[$name]-}" ] || continue
        printf '%-10s %-14s %12.0f %12s %16s\n' $case $name "${best[$name]}" "${tail[$name]}" "${cost[$name]}"
    done
    for name in redis-ping redis-set-ex redis-cell throttlecrab; do
        [ -n "${best[$name]-}" ] || continue
        awk "BEGIN { printf \"ratio $case $name %.2f\\n\", ${best[tallygate]} / ${best[$name]} }"
    done
done

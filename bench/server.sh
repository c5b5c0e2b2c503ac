#!/usr/bin/env bash
# The server beside rivals, in one run: RESP by redis-benchmark with 50 connections, HTTP by wrk with as many, keys at
# random over 100 000, every request admitted. The best of three rounds of each counts; the rounds are interleaved.
#
#   resp-p1, resp-p16   CL.THROTTLE, one or sixteen commands in flight a connection
#   http                POST /v1/check
#
# Rivals: redis-server with PING (decides nothing) and with SET key value EX 60 (as long, and writes); redis-cell as a
# module of redis-server, and throttlecrab-server (RESP and HTTP), both built from the crate registry into target/rivals
# when they are missing; BENCH_NO_RIVALS leaves out those two where they are not built yet.
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
# A command and the packages it is in, if it is missing and can be installed.
need() { has "$1" || { [ "$(id -u)" -eq 0 ] && apt-get install -y -qq "${@:2}" >/dev/null; } || true; }
need wrk wrk
need redis-server redis-server
need redis-benchmark redis-tools

cell=target/rivals/redis-cell
[ -f $cell.so ] || [ -n "${BENCH_NO_RIVALS-}" ] || {
    # A library, which cargo installs only as somebody's dependency.
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
until grep -q '^tallygate ready' "$work/tallygate"; do sleep 0.05; done
tallygate_http=$(sed -n 's/^http //p' "$work/tallygate")
tallygate_resp=$(sed -n 's/^resp .*://p' "$work/tallygate")

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
# Waits until a process answers on its port.
answers() { until redis-cli -p "$2" ping >/dev/null 2>&1; do kill -0 "$1" && sleep 0.05; done; }
redis_port=$(free_port)
# The module leaves Rust's standard library to the system.
LD_LIBRARY_PATH=$(rustc --print target-libdir) redis-server --port "$redis_port" --bind 127.0.0.1 --save "" --appendonly no \
    $([ ! -f $cell.so ] || echo --loadmodule "$PWD/$cell.so") >/dev/null &
pids+=($!)
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
    answers $! "$crab_resp"
fi

throttle=(CL.THROTTLE key:__rand_int__ 1000000 1000000 60)
# What a RESP entrant is asked, and where.
entrant() {
    case $1 in
    tallygate) echo "$tallygate_resp" "${throttle[@]}" ;;
    redis-ping) echo "$redis_port" PING ;;
    redis-set-ex) echo "$redis_port" SET set:__rand_int__ value EX 60 ;;
    redis-cell) [ ! -f $cell.so ] || echo "$redis_port" "${throttle[@]}" ;;
    throttlecrab) [ ! -x $crab ] || echo "$crab_resp" THROTTLE key:__rand_int__ 1000000 1000000 60 ;;
    esac
}

# Requests a second and p99 in ms.
resp() {
    local pipeline=$1 count=$2 port=$3
    shift 3
    redis-benchmark -p "$port" -c 50 -n "$count" -P "$pipeline" -r 100000 --csv "$@" 2>/dev/null |
        tail -n 1 | awk -F'","' '{ print $2, $7 }'
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
        awk '/Requests\/sec/ { rate = $2 } $1 == "99%" { p99 = $2 } END { print rate, p99 }'
}

printf '%-10s %-14s %12s %12s\n' case entrant requests/s p99
for case in resp-p1 resp-p16 http; do
    declare -A best=() tail=()
    for _ in $(seq "$rounds"); do
        for name in tallygate redis-ping redis-set-ex redis-cell throttlecrab; do
            if [ $case = http ]; then
                case $name in
                tallygate) result=$(http "$tallygate_http" /v1/check '{"policy":"bench","key":"key:%d"}') ;;
                throttlecrab)
                    [ -x $crab ] || continue
                    result=$(http "127.0.0.1:$crab_http" /throttle \
                        '{"key":"key:%d","max_burst":1000000,"count_per_period":1000000,"period":60}')
                    ;;
                *) continue ;;
                esac
            else
                read -ra question <<<"$(entrant $name)"
                [ ${#question[@]} -gt 0 ] || continue
                pipeline=${case#resp-p} count=$requests
                [ "$pipeline" -gt 1 ] || count=$((requests / 5))
                # The slow ones get fewer.
                [ $name != throttlecrab ] || count=$((count / 10))
                result=$(resp "$pipeline" "$count" "${question[@]}")
            fi
            read -r rate p99 <<<"$result"
            if awk "BEGIN { exit !(${rate:-0} > ${best[$name]:-0}) }"; then
                best[$name]=$rate tail[$name]=$p99
            fi
        done
    done
    for name in tallygate redis-ping redis-set-ex redis-cell throttlecrab; do
        [ -n "${best[$name]-}" ] || continue
        printf '%-10s %-14s %12.0f %12s\n' $case $name "${best[$name]}" "${tail[$name]}"
    done
    for name in redis-ping redis-set-ex redis-cell throttlecrab; do
        [ -n "${best[$name]-}" ] || continue
        awk "BEGIN { printf \"ratio $case $name %.2f\\n\", ${best[tallygate]} / ${best[$name]} }"
    done
done

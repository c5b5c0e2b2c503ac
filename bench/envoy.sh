#!/usr/bin/env bash
# Measures Envoy's rate limit service. Every request is allowed; 100 000 random keys; 32 calls at a time per connection. The
# best of three interleaved rounds counts.
#
#   grpc-c1, grpc-c8   calls per second with one and eight HTTP/2 connections, beside throttlecrab-server in one run
#   through envoy      latency of one request at a time through Envoy, with the rate limit filter on and off
#
# throttlecrab-server is built from the crate registry into target/rivals if it is missing; with BENCH_NO_RIVALS it is left out.
# With BENCH_QUICK, everything runs in seconds with a debug build, to see that it works.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${BENCH_ROUNDS:-3} seconds=${BENCH_SECONDS:-5} requests=${BENCH_REQUESTS:-20000} profile=release
if [ -n "${BENCH_QUICK-}" ]; then
    rounds=1 seconds=1 requests=200 profile=dev
fi
work=$(mktemp -d)
pids=()
stop() { for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true; rm -rf "$work"; }
trap stop EXIT

scripts/install-test-proxies >/dev/null
# The same selection of features as in `scripts/test` for the quick run.
[ $profile = release ] && cargo build -q --locked --release -p tallygate-cli --bin tallygate --example grpc_load
[ $profile = release ] || cargo build -q --locked --workspace --all-features --bins --examples
binaries=target/$([ $profile = release ] && echo release || echo debug)
load=$binaries/examples/grpc_load

cat >"$work/rules.yaml" <<'YAML'
domain: bench
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 1000000}
YAML
$binaries/tallygate serve --http 127.0.0.1:0 --resp 127.0.0.1:0 --grpc 127.0.0.1:0 --envoy-config "$work/rules.yaml" \
    --log error >"$work/tallygate" &
pids+=($!)
until grep -q '^tallygate ready' "$work/tallygate"; do sleep 0.05; done
http=$(sed -n 's/^http //p' "$work/tallygate") grpc=$(sed -n 's/^grpc //p' "$work/tallygate")

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
listens() { until (exec 3<>"/dev/tcp/127.0.0.1/$2") 2>/dev/null; do kill -0 "$1" && sleep 0.05; done; }
crab=target/rivals/bin/throttlecrab-server
[ -x $crab ] || [ -n "${BENCH_NO_RIVALS-}" ] || {
    command -v protoc >/dev/null || [ "$(id -u)" -ne 0 ] || apt-get install -y -qq protobuf-compiler libprotobuf-dev >/dev/null
    cargo install -q --root target/rivals throttlecrab-server >&2
} || true
if [ -x $crab ]; then
    crab_port=$(free_port)
    $crab --grpc --grpc-host 127.0.0.1 --grpc-port "$crab_port" --log-level error >/dev/null 2>&1 &
    pids+=($!)
    listens $! "$crab_port"
fi

printf '%-10s %-14s %10s %10s %10s\n' case entrant calls/s p50-us p99-us
for connections in 1 8; do
    declare -A best=() rest=()
    for _ in $(seq "$rounds"); do
        for name in tallygate throttlecrab; do
            address=$grpc
            if [ $name = throttlecrab ]; then
                [ -x $crab ] || continue
                address=127.0.0.1:$crab_port
            fi
            read -r rate p50 p99 <<<"$($load grpc "$address" $name $connections 32 "$seconds")"
            if [ "$rate" -gt "${best[$name]:-0}" ]; then best[$name]=$rate rest[$name]="$p50 $p99"; fi
        done
    done
    for name in tallygate throttlecrab; do
        [ -n "${best[$name]-}" ] || continue
        read -r p50 p99 <<<"${rest[$name]}"
        printf '%-10s %-14s %10s %10s %10s\n' grpc-c$connections $name "${best[$name]}" "$p50" "$p99"
    done
    [ -z "${best[throttlecrab]-}" ] ||
        awk "BEGIN { printf \"ratio grpc-c$connections throttlecrab %.2f\\n\", ${best[tallygate]} / ${best[throttlecrab]} }"
done

# Writes the configuration of an Envoy with or without the filter, in front of the HTTP listener of the server.
envoy() {
    local port=$1 filter=$2
    cat <<YAML
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: $port}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: main
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: /}
                route:
                  cluster: site
                  rate_limits: [{actions: [{request_headers: {header_name: x-user, descriptor_key: user}}]}]
          http_filters:$filter
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: site
    load_assignment: {cluster_name: site, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: ${http##*:}}}}}]}]}
  - name: tallygate
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment: {cluster_name: tallygate, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: ${grpc##*:}}}}}]}]}
YAML
}
on='
          - name: envoy.filters.http.ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: bench
              failure_mode_deny: true
              timeout: 1s
              rate_limit_service: {transport_api_version: V3, grpc_service: {envoy_grpc: {cluster_name: tallygate}}}'
declare -A port=()
for name in off on; do
    port[$name]=$(free_port)
    envoy "${port[$name]}" "$([ $name = on ] && echo "$on" || true)" >"$work/$name.yaml"
    target/test-servers/envoy -c "$work/$name.yaml" --use-dynamic-base-id --concurrency 1 --log-level error >/dev/null 2>&1 &
    pids+=($!)
    listens $! "${port[$name]}"
done
printf '%-16s %10s %10s\n' 'through envoy' p50-us p99-us
declare -A p50s=() p99s=()
for _ in $(seq "$rounds"); do
    for name in off on; do
        read -r _ p50 p99 <<<"$($load http "127.0.0.1:${port[$name]}" /livez "$requests")"
        if [ "$p50" -lt "${p50s[$name]:-999999999}" ]; then p50s[$name]=$p50 p99s[$name]=$p99; fi
    done
done
for name in off on; do printf 'filter %-9s %10s %10s\n' $name "${p50s[$name]}" "${p99s[$name]}"; done
printf '%-16s %10s %10s\n' added $((p50s[on] - p50s[off])) $((p99s[on] - p99s[off]))

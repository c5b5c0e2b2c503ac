//! The attacks on the server.
//!
//! | file | contents |
//! |---|---|
//! | `connections.rs` | requests that never end, replies that are not read, connections without number |
//! | `http2.rs` | frames that client libraries do not send |
//! | `work.rs` | requests that cost much processor time or memory each |
//! | `store.rs` | keys that fill the store |
//! | `quota.rs` | attempts to get more than the quota |
//! | `access.rs` | attempts to administer or to charge without permission |
//! | `mix.rs` | all attacks on memory at once |

mod access;
mod connections;
mod http2;
mod mix;
mod quota;
mod store;
mod work;

use crate::attack::{Attack, Attempt, MemoryBound, Promise, attack};
use crate::medians;
use crate::server::StoreKind;

/// One address may use 64 MiB of buffers for bodies and replies. Growing buffers take up to twice the size of their
/// contents, and each connection has buffers of its own.
const SHARE_MIB: u64 = 2 * 64 + 32;

/// The attacks. All come from one address that is not the good client's, unless they say otherwise.
pub(crate) const ATTACKS: &[Attack] = &[
    attack("half-open", 1, 64, connections::half_open),
    attack("slow-bodies", 1, 64, connections::slow_bodies),
    attack("endless-bodies", 4, 64, connections::endless_bodies),
    attack("unfinished-bodies", 1, SHARE_MIB, connections::unfinished_bodies),
    attack("http-pipelines-unread", 1, 64, connections::http_pipelines),
    attack("resp-pipelines-unread", 1, 64, connections::resp_pipelines),
    attack("resp-words", 1, 64, connections::resp_words),
    // An address may have many connections here, so that they need not come from many addresses.
    Attack { config: guarded, ..attack("unauthenticated", 2, 96, connections::unauthenticated) },
    attack("connections", 2, 64, connections::connections),
    Attack { lets_in: false, ..attack("no-descriptors", 1, 16, connections::no_descriptors) },
    attack("http2-closed-windows", 1, SHARE_MIB, http2::closed_windows),
    attack("http2-rapid-reset", 2, 64, http2::rapid_reset),
    attack("http2-continuation", 2, 64, http2::continuation),
    attack("http2-header-bombs", 2, 64, http2::header_bombs),
    attack("http2-pings-unread", 1, 64, http2::pings),
    by_work("http2-tiny-fields", 1, SHARE_MIB, http2::tiny_fields),
    attack("http2-empty-frames", 2, 64, http2::empty_frames),
    by_work("resp-commands", 2, 64, work::resp_commands),
    by_work("simulations", 4, 64, work::simulations),
    by_work("large-lists", 3, 64, work::large_lists),
    by_work("large-alls", 3, 64, work::large_alls),
    by_work("accepted-alls", 3, 128, work::accepted_alls),
    Attack { config: medians::config, ..by_work("unknown-names", 1, 16, work::unknown_names) },
    Attack { config: loopback, ..by_work("archives", 3, 576, work::archives) },
    Attack {
        after: |attempt| attempt.expects(store::count_keys(attempt)),
        ..attack("throttle-numbers", 1, 128, store::throttle_numbers)
    },
    attack("throttle-years", 1, 16, store::throttle_years),
    Attack {
        store: StoreKind::Redis(16),
        after: |attempt| attempt.expects(store::nothing_is_kept(attempt)),
        ..attack("redis-years", 1, 16, store::throttle_years)
    },
    Attack {
        store: StoreKind::Redis(16),
        config: || {
            "[policies.closed]\nlimit = 5\nwindow = \"1h\"\non_store_error = \"deny\"\n".to_owned()
        },
        // The checks of all clients wait in the same queue of Redis.
        latency: Promise::Replies,
        after: |attempt| attempt.expects(store::is_degraded_and_recovers(attempt)),
        ..attack("redis-full", 1, 64, |attempt| attempt.expects(store::fill_redis(attempt)))
    },
    Attack {
        store: StoreKind::Redis(256),
        latency: Promise::Replies,
        ..attack("redis-lists", 3, 64, work::over_redis)
    },
    Attack {
        store: StoreKind::Cluster,
        after: |attempt| attempt.expects(store::slots_are_spread(attempt)),
        ..attack("cluster-slots", 1, 32, |attempt| attempt.expects(store::one_slot(attempt)))
    },
    Attack {
        after: |attempt| attempt.expects(quota::others_reserve(attempt)),
        ..attack("reservation-bytes", 1, 64, quota::reserve_bytes)
    },
    // From nine addresses.
    Attack {
        after: |attempt| attempt.expects(quota::others_reserve(attempt)),
        ..attack("reservation-places", 9, 128, quota::reserve_places)
    },
    attack("reservation-ids", 1, 16, |attempt| attempt.expects(quota::guess_ids(attempt))),
    Attack {
        config: quota::bank_config,
        ..attack("reservation-banks", 6, 16, |attempt| attempt.expects(quota::bank(attempt)))
    },
    Attack {
        config: || quota::DEBT_CONFIG.to_owned(),
        options: &["--max-keys", "100000"],
        ..by_work("debts", 3, 64, |attempt| attempt.expects(quota::wash_out(attempt)))
    },
    attack("stock-proxies", 1, 16, |attempt| attempt.expects(access::through_proxies(attempt))),
    Attack {
        config: loopback,
        ..attack("other-sites", 1, 16, |attempt| attempt.expects(access::from_other_sites(attempt)))
    },
    // From forty-five addresses, with the rights of an administrator.
    Attack {
        config: loopback,
        most: MemoryBound::Formula,
        seconds: 15,
        ..by_work("mix", mix::ATTACKERS, 0, mix::all)
    },
];

/// Returns an attack that is about work: the attackers send as much as they can.
const fn by_work(name: &'static str, attackers: usize, most_mib: u64, run: fn(&Attempt)) -> Attack {
    Attack { latency: Promise::Median, ..attack(name, attackers, most_mib, run) }
}

/// Checks need a token, and an address may have many connections.
fn guarded() -> String {
    "[auth]\ncheck = [\"env:ABUSE_TOKEN\"]\n[limits]\nmax_connections_per_address = 5000\n"
        .to_owned()
}

/// The attacker may administer.
fn loopback() -> String {
    "[admin]\nloopback = true\n".to_owned()
}

//! Values that are read when metrics are requested: of policies, memory and the Redis client.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use tallygate::store::Usage;
use tallygate::tiers::Access;
use tallygate::{Limit, Source, Ticks};
use tallygate_lab::duration::DurationText;
use tallygate_redis::Counts;

use super::families::{Families, Labels};
use super::{PolicyMetrics, SurfaceLatencies};
use crate::logs;

/// Values that are read when metrics are requested.
pub(crate) struct Figures {
    /// The upper bound of the memory of the server.
    pub(crate) memory_bound: u64,
    /// Bytes buffered for clients, of `max_buffer_bytes`.
    pub(crate) buffer_bytes: usize,
    pub(crate) policies: Vec<PolicyFigures>,
    /// The number of open reservations.
    pub(crate) reservations_open: usize,
    /// The counters of the Redis client, if Redis keeps the keys.
    pub(crate) store: Option<Counts>,
}

/// Writes the figures and the response times of the surfaces.
pub(super) struct FiguresCollector {
    pub(super) figures: Figures,
    pub(super) latencies: SurfaceLatencies,
}

/// The values of one policy.
pub(crate) struct PolicyFigures {
    pub(crate) policy: Arc<str>,
    pub(crate) metrics: Arc<PolicyMetrics>,
    /// The keys in memory; `None` if they are in Redis.
    pub(crate) usage: Option<Usage>,
    pub(crate) rules: PolicyRules,
}

/// The limits of a policy.
pub(crate) enum PolicyRules {
    /// The limits of the policy, and those of its tiers.
    Configured { base: Access, tiers: Vec<(Box<str>, Access)> },
    /// The limits come with each request.
    OfRequests { algorithm: &'static str },
}

impl Figures {
    fn encode_server(&self, families: &mut Families<'_>) -> fmt::Result {
        let version = env!("CARGO_PKG_VERSION");
        families.infos("build", "Version of the server", vec![[("version", version)]])?;
        families.counter(
            "log_lines_lost",
            "Log lines dropped because standard error did not accept them in time",
            &logs::lines_lost(),
        )?;
        families.gauge(
            "memory_bound_bytes",
            "Upper bound of the memory that the server can use with this configuration",
            &self.memory_bound,
        )?;
        families.gauge(
            "buffer_bytes",
            "Bytes of requests and responses that the server holds for clients; the maximum is max_buffer_bytes",
            &self.buffer_bytes,
        )?;
        families.gauge(
            "reservations_open",
            "Reservations that are not settled yet",
            &self.reservations_open,
        )
    }

    fn encode_policies(&self, families: &mut Families<'_>) -> fmt::Result {
        let (mut decisions, mut usages) = (Vec::new(), Vec::new());
        for one in &self.policies {
            let policy = ("policy", &*one.policy);
            for (outcome, source, count) in one.metrics.decisions() {
                // Create the series at startup, so that alerts on an increase also see the first event. Without Redis,
                // there are no other sources.
                if self.store.is_some() || source == Source::Store || count > 0 {
                    decisions
                        .push(([policy, ("outcome", outcome), ("source", source.name())], count));
                }
            }
            usages.extend(one.usage.map(|usage| ([policy], usage)));
        }
        families.counters("decisions", "Decisions by policy, outcome and source", decisions)?;
        let shadow: Vec<_> = self.policies.iter().map(PolicyFigures::shadow_denials).collect();
        let shadow = self.policies.iter().zip(&shadow).flat_map(|(one, denials)| {
            denials
                .iter()
                .map(|(limit, count)| ([("policy", &*one.policy), ("limit", limit)], *count))
        });
        let help = "Requests that a shadow limit would have denied";
        families.counters("shadow_denials", help, shadow.collect())?;
        self.encode_rules(families)?;
        let keys = usages.iter().map(|(labels, usage)| (*labels, usage.keys)).collect();
        families.gauges("keys_kept", "Keys in memory, idle ones included", keys)?;
        let in_use = |usage: &Usage| usage.in_use.unwrap_or(usage.keys);
        let in_use = usages.iter().map(|(labels, usage)| (*labels, in_use(usage))).collect();
        let help = "Keys in memory that were in use at the last sweep; before the first sweep, all keys in memory";
        families.gauges("keys_in_use", help, in_use)?;
        let of = |read: fn(&Usage) -> u64| {
            usages.iter().map(|(labels, usage)| (*labels, read(usage))).collect()
        };
        let help = "Keys dropped from memory because their quota was full again";
        families.counters("keys_expired", help, of(|usage| usage.swept))?;
        let help = "Keys evicted before their quota was full again, because the store was full";
        families.counters("evictions", help, of(|usage| usage.evicted))?;
        let help = "New keys not stored because the store was full";
        families.counters("keys_rejected", help, of(|usage| usage.rejected))?;
        let help = "Units of settled reservations beyond the bound on debt, which were not charged";
        families.counters("debt_dropped_units", help, of(|usage| usage.debt_dropped))
    }

    /// Writes the algorithm and the numbers of each limit, so that queries can join them by policy.
    fn encode_rules(&self, families: &mut Families<'_>) -> fmt::Result {
        let rules: Vec<_> = self.policies.iter().map(|one| one.rules.summary()).collect();
        let infos = self.policies.iter().zip(&rules).map(|(one, (algorithm, rule))| {
            [("policy", &*one.policy), ("algorithm", &**algorithm), ("rule", &**rule)]
        });
        families.infos(
            "policy",
            "Algorithm and rule of each policy, as labels",
            infos.collect(),
        )?;
        let limits: Vec<_> = self.policies.iter().flat_map(PolicyFigures::limits).collect();
        let labels = limits.iter().map(LimitLabels::labels).collect();
        families.infos("limit", "Limit, window, burst and options of each limit, as labels", labels)
    }

    /// Writes the counters of the Redis client.
    fn encode_store(&self, families: &mut Families<'_>) -> fmt::Result {
        let Some(counts) = &self.store else { return Ok(()) };
        for (name, help, value) in [
            ("calls", "Calls sent to the store", counts.calls),
            ("timeouts", "Calls without a reply in time", counts.timeouts),
            ("errors", "Decisions that the store could not make, for any reason", counts.errors),
            (
                "overloaded",
                "Checks denied because the store did not decide them in time",
                counts.overloaded,
            ),
            (
                "races_retried",
                "Writes retried because another process wrote the key first",
                counts.contended,
            ),
            (
                "races_lost",
                "Checks denied as overloaded because other processes changed the key before each write",
                counts.races_lost,
            ),
            (
                "out_of_memory_replies",
                "Calls rejected because the store is out of memory",
                counts.out_of_memory,
            ),
            ("breaker_opened", "Times that the circuit breaker opened", counts.breaker_opened),
            ("connections", "Connections made to the store", counts.connections),
            (
                "redirections",
                "Calls redirected to another node of the cluster",
                counts.redirections,
            ),
            (
                "charged_late",
                "Keys whose usage during an outage was charged to the store after it",
                counts.debts_charged,
            ),
            (
                "refunds_failed",
                "Units charged by a denied joint check that could not be refunded",
                counts.unreturned,
            ),
            (
                "coalesced",
                "Checks sent to the store in the call of another check of the same key",
                counts.coalesced,
            ),
            ("leased_units", "Units taken on lease", counts.leased),
            ("lease_returned_units", "Leased units returned to the store", counts.lease_returned),
            ("lease_expired_units", "Leased units that expired unused", counts.lease_expired),
        ] {
            families.counter(&format!("store_{name}"), help, &value)?;
        }
        families.gauge(
            "store_breaker_open",
            "1 while the circuit breaker is open",
            &u32::from(counts.is_open),
        )?;
        families.gauge(
            "store_out_of_memory",
            "1 if the store rejected a write for lack of memory in the last 5 s",
            &u32::from(counts.is_out_of_memory),
        )?;
        families.gauge(
            "store_rejecting",
            "1 while the store answers, but rejects every call, for example because a password is missing",
            &u32::from(counts.is_rejecting),
        )
    }
}

impl Collector for FiguresCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families::new(encoder);
        self.figures.encode_server(&mut families)?;
        let help = "Time to answer a request (for RESP, a batch of pipelined commands)";
        let mut latency = families.begin("request_seconds", help, MetricType::Histogram)?;
        for (surface, times) in &self.latencies {
            times.encode(latency.encode_family(&[("surface", *surface)])?)?;
        }
        self.figures.encode_policies(&mut families)?;
        self.figures.encode_store(&mut families)
    }
}

impl fmt::Debug for FiguresCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FiguresCollector").finish_non_exhaustive()
    }
}

/// The labels of one limit.
struct LimitLabels<'a> {
    policy: &'a str,
    /// Empty for the limits of the policy itself.
    tier: &'a str,
    limit: &'a str,
    algorithm: &'static str,
    quota: String,
    window: String,
    burst: String,
    shadow: &'static str,
}

impl LimitLabels<'_> {
    fn labels(&self) -> Labels<'_, 8> {
        [
            ("policy", self.policy),
            ("tier", self.tier),
            ("limit", self.limit),
            ("algorithm", self.algorithm),
            ("quota", &self.quota),
            ("window", &self.window),
            ("burst", &self.burst),
            ("shadow", self.shadow),
        ]
    }
}

impl PolicyFigures {
    /// Returns the denials of shadow limits, with zeros for the limits that have denied nothing yet.
    fn shadow_denials(&self) -> BTreeMap<Arc<str>, u64> {
        let counted = self.metrics.shadow_denials();
        let shadows = self.rules.limits().filter(|(_, limit)| limit.is_shadow());
        let silent = shadows.map(|(_, limit)| (limit.name().into(), 0));
        silent.chain(counted).collect()
    }

    fn limits(&self) -> impl Iterator<Item = LimitLabels<'_>> {
        self.rules.limits().map(|(tier, limit)| {
            let numbers = limit.numbers();
            LimitLabels {
                policy: &self.policy,
                tier,
                limit: limit.name(),
                algorithm: numbers.kind.name(),
                quota: numbers.limit.to_string(),
                window: duration(numbers.window),
                burst: numbers.burst.to_string(),
                shadow: if limit.is_shadow() { "true" } else { "false" },
            }
        })
    }
}

impl PolicyRules {
    /// Returns the limits, each with the name of its tier.
    fn limits(&self) -> impl Iterator<Item = (&str, &Limit)> {
        let (base, tiers) = match self {
            Self::Configured { base, tiers } => (Some(("", base)), tiers.as_slice()),
            Self::OfRequests { .. } => (None, [].as_slice()),
        };
        let tiers = tiers.iter().map(|(tier, access)| (&**tier, access));
        base.into_iter().chain(tiers).flat_map(|(tier, access)| {
            let limits = match access {
                Access::Limited(policy) => policy.limits(),
                _ => &[],
            };
            limits.iter().map(move |limit| (tier, limit))
        })
    }

    /// Returns the algorithms of the policy, without its tiers, and its rule in words.
    fn summary(&self) -> (String, String) {
        match self {
            Self::Configured { base, .. } => {
                let algorithm = match base {
                    Access::Limited(policy) => {
                        let mut names: Vec<_> = policy
                            .limits()
                            .iter()
                            .map(|limit| limit.numbers().kind.name())
                            .collect();
                        names.dedup();
                        names.join("+")
                    }
                    Access::Unlimited => "unlimited".to_owned(),
                    Access::Blocked => "blocked".to_owned(),
                };
                (algorithm, base.to_string())
            }
            Self::OfRequests { algorithm } => {
                ((*algorithm).to_owned(), "the numbers of each request".to_owned())
            }
        }
    }
}

fn duration(span: Ticks) -> String {
    DurationText(std::time::Duration::from_nanos(span.0)).to_string()
}

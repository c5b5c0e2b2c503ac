//! Decides on the keys of a joint decision one after the other, where no single step can decide on all of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tallygate::Tick;
use tallygate::algorithm::Timed;
use tallygate::merge::KeyCost;
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use super::key_parts::{Answers, ChargedKey, KeyParts, all_allow};
use crate::error::Error;
use crate::failure::ShareCharge;

/// The decision on one key.
enum KeyDecision {
    ByRedis(ChargedKey),
    /// The failure settings of its parts decided, because its server did not answer in time.
    ByFailurePolicy(Answers, KeyCost),
}

impl KeyDecision {
    fn is_allowed(&self) -> bool {
        match self {
            Self::ByRedis(charged) => all_allow(&charged.answers),
            Self::ByFailurePolicy(answers, _) => all_allow(answers),
        }
    }

    fn into_answers(self) -> Answers {
        match self {
            Self::ByRedis(charged) => charged.answers,
            Self::ByFailurePolicy(answers, _) => answers,
        }
    }
}

/// Charges one key after the other, and returns the charges if one denies. If a server does not answer, the failure settings
/// decide on its own keys only: the limits on other servers hold.
pub(super) async fn charge_in_order(
    keys: &[KeyParts<'_>],
    shares: &mut [Option<ShareCharge<'_>>],
    now: Option<Tick>,
) -> Result<Answers, Error> {
    let mut decided: Vec<KeyDecision> = Vec::with_capacity(keys.len());
    let mut failed = None;
    // One budget for all keys, and for returning their charges.
    let deadline = keys[0].redis().deadline();
    for (key, share) in keys.iter().zip(shares) {
        let decision = match key.reserve(now, deadline).await {
            Ok(charged) => Ok(KeyDecision::ByRedis(charged)),
            Err(error) => {
                // The failure setting charges the share itself.
                drop(share.take());
                let fallen_back = key.fall_back(&error, now);
                fallen_back.map(|(answers, sum)| KeyDecision::ByFailurePolicy(answers, sum))
            }
        };
        match decision {
            Ok(decision) => {
                let is_allowed = decision.is_allowed();
                decided.push(decision);
                if !is_allowed {
                    break;
                }
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    if failed.is_some() || !decided.last().is_none_or(KeyDecision::is_allowed) {
        return_charges(keys, &mut decided, now, deadline).await;
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(decided.into_iter().flat_map(KeyDecision::into_answers).collect()),
    }
}

/// Returns the charges of some keys. Returns that are not done by the deadline continue in the background: the caller has its
/// answer in time, and no unit is lost because of a late reply.
async fn return_charges(
    keys: &[KeyParts<'_>],
    decided: &mut [KeyDecision],
    now: Option<Tick>,
    deadline: Instant,
) {
    let mut to_return = Vec::with_capacity(decided.len());
    for (key, decision) in keys.iter().zip(decided) {
        match decision {
            KeyDecision::ByRedis(charged) if all_allow(&charged.answers) && charged.cost > 0 => {
                to_return.push((key, charged));
            }
            KeyDecision::ByRedis(_) => {}
            KeyDecision::ByFailurePolicy(answers, sum) => key.uncharge(answers, sum, now),
        }
    }
    let returning: Vec<(&mut ChargedKey, JoinHandle<Option<Timed>>)> = to_return
        .into_iter()
        .map(|(key, charged)| {
            let ((index, part), cost) = (key.parts[charged.charger], charged.cost);
            let charged_at = charged.answers.iter().find(|(other, _)| *other == index);
            let charged_at = charged_at.map_or(Tick(i64::MAX), |(_, timed)| timed.at);
            let returned = part.return_charge(cost, charged.receipt.clone(), charged_at, now);
            let redis = part.store().redis().clone();
            let name: Arc<str> = part.store().name().into();
            let task = tokio::spawn(async move {
                returned
                    .await
                    .inspect_err(|error| {
                        redis.inner().counters.unreturned.fetch_add(cost, Ordering::Relaxed);
                        tracing::warn!(
                            policy = &*name, units = cost, %error,
                            "another key denied the request, and the charge to this key cannot be refunded; its units stay charged until they expire"
                        );
                    })
                    .ok()
            });
            (charged, task)
        })
        .collect();
    for (charged, task) in returning {
        let Ok(Ok(Some(returned))) = timeout_at(deadline.into(), task).await else { continue };
        // Only the part that charged, which is the last one, reports the state after that.
        let last = charged.answers.len() - 1;
        charged.answers[last].1 = returned;
    }
}

/// Decides by the failure settings. Units that were charged to one key in this process are returned if another key denies.
pub(super) fn decide_without_redis(
    keys: &[KeyParts<'_>],
    error: &Error,
    now: Option<Tick>,
) -> Result<Answers, Error> {
    let each = keys.iter().map(|key| key.fall_back(error, now));
    let mut decided = each.collect::<Result<Vec<_>, _>>()?;
    if !decided.iter().all(|(answers, _)| all_allow(answers)) {
        for (key, (answers, sum)) in keys.iter().zip(&mut decided) {
            key.uncharge(answers, sum, now);
        }
    }
    Ok(decided.into_iter().flat_map(|(answers, _)| answers).collect())
}

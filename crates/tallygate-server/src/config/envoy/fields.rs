//! The fields of a file of envoyproxy/ratelimit. Unknown fields are errors.
//!
//! All fields of that project are read. A `rate_limit` has a few more here: `algorithm`, `burst`, `unit_multiplier`,
//! `on_store_error` and `instances`. That project ignores a known field in the wrong place, so it is a warning here.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tallygate::policy::LimitBuilder;
use tallygate::tiers::Access;
use tallygate::{Kind, Policy, Quota, Tiers};
use tallygate_lab::duration::DurationText;
use tallygate_lab::limit_syntax::in_durations;
use tallygate_lab::names::nearest;
use tallygate_redis::OnFailure;

use super::super::limits::LONGEST_TIME;
use super::super::{KeySource, PolicyConfig};
use super::matching::{
    DescriptorRule, Domain, EnvoyLimit, EnvoyMode, EnvoyRule, Glob, Level, MAX_ENTRIES, Unit,
    policy_name,
};
use super::yaml::{self, Content, Node, Place, YamlError};
use super::{EnvoyConfig, Policies};

/// The path of a descriptor: keys, and values where the file gives them.
type Path<'a> = Vec<(&'a str, Option<&'a str>)>;

/// Adds the domains of a text, and a policy for each of their limits.
///
/// # Errors
///
/// Fails if the text is invalid. What was added before stays.
pub(super) fn add(
    text: &str,
    file: &str,
    config: &mut EnvoyConfig,
    policies: &mut Policies,
) -> Result<(), YamlError> {
    let documents = yaml::parse(text)?;
    if documents.is_empty() {
        return Err(Place::START.error("the file is empty; it needs a `domain` and `descriptors`"));
    }
    for document in &documents {
        add_domain(document, file, config, policies)?;
    }
    Ok(())
}

fn add_domain(
    node: &Node<'_>,
    file: &str,
    EnvoyConfig { domains, warnings, settings }: &mut EnvoyConfig,
    policies: &mut Policies,
) -> Result<(), YamlError> {
    let fields = Fields::of(node, &["domain", "descriptors"])?;
    fields.warn_of_misplaced(file, warnings);
    let name = match fields.text("domain")? {
        Some(name) if !name.is_empty() => name,
        _ => return Err(node.error("`domain` is missing or empty; each file needs one")),
    };
    let place = fields.place("domain");
    let mut domain = match domains.take(name) {
        Some(first) if !settings.merge_domains => {
            return Err(place.error(format!(
                "domain {name:?} is already defined in {}; put all its descriptors in one place, or set \
                 `merge_domains = true` in `[envoy]`",
                first.defined_in
            )));
        }
        Some(first) => first,
        None => {
            // Limits that come with requests have a policy of their own, which limits nothing by itself.
            let override_policy = policy_name(name, &[]);
            let policy = PolicyConfig::of_envoy(Access::Unlimited, OnFailure::Deny, false);
            add_policy(policies, &override_policy, policy, node)?;
            let defined_in = format!("{file}:{}", place.line).into();
            Domain { override_policy, defined_in, rules: Level::default() }
        }
    };
    let source = Arc::from(file);
    let mut building =
        DomainBuilder { domain: name, file, source, policies, warnings, path: Path::new() };
    building.add_to(&mut domain.rules, fields.list("descriptors")?)?;
    domains.insert(name.into(), domain);
    Ok(())
}

fn add_policy(
    policies: &mut Policies,
    name: &Arc<str>,
    policy: PolicyConfig,
    node: &Node<'_>,
) -> Result<(), YamlError> {
    match policies.insert(name.clone(), policy) {
        None => Ok(()),
        Some(_) => Err(node.error(format!(
            "there is already a policy named {name:?}, which this rule needs; rename that policy"
        ))),
    }
}

struct DomainBuilder<'a, 'p> {
    domain: &'a str,
    file: &'p str,
    /// The file, for the rules that it defines.
    source: Arc<str>,
    policies: &'p mut Policies,
    warnings: &'p mut Vec<String>,
    path: Path<'a>,
}

const DESCRIPTOR_FIELDS: [&str; 10] = [
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];

const LIMIT_FIELDS: [&str; 10] = [
    "unit",
    "requests_per_unit",
    "unlimited",
    "name",
    "replaces",
    "algorithm",
    "burst",
    "unit_multiplier",
    "on_store_error",
    "instances",
];

impl<'a> DomainBuilder<'a, '_> {
    fn add_to(&mut self, level: &mut Level, descriptors: &'a [Node<'_>]) -> Result<(), YamlError> {
        for node in descriptors {
            if self.path.len() == MAX_ENTRIES {
                return Err(node.error(format!(
                    "descriptors are nested too deeply; use at most {MAX_ENTRIES} levels"
                )));
            }
            let fields = Fields::of(node, &DESCRIPTOR_FIELDS)?;
            fields.warn_of_misplaced(self.file, self.warnings);
            let key = match fields.text("key")? {
                Some(key) if !key.is_empty() => key,
                _ => return Err(node.error("`key` is missing or empty; each descriptor needs one")),
            };
            let value = fields.text("value")?.filter(|value| !value.is_empty());
            self.path.push((key, value));
            if let Some(DescriptorRule { file, line, .. }) = level.get(key, value) {
                let path = policy_name(self.domain, &self.path);
                let path = path.strip_prefix("envoy:").unwrap_or(&path);
                let of_file =
                    if **file == *self.file { String::new() } else { format!(" of {file}") };
                return Err(node.error(format!(
                    "duplicate descriptor {path}; its key and value are already on line {line}{of_file}; remove one of \
                     them"
                )));
            }
            let rule = self.descriptor(node, &fields, (key, value))?;
            level.insert(key, value, rule);
            self.path.pop();
        }
        Ok(())
    }

    fn descriptor(
        &mut self,
        node: &'a Node<'_>,
        fields: &Fields<'a>,
        (key, value): (&str, Option<&str>),
    ) -> Result<DescriptorRule, YamlError> {
        let mode = match (fields.flag("shadow_mode")?, fields.flag("quota_mode")?) {
            (true, true) => {
                return Err(fields.place("quota_mode").error(
                    "`shadow_mode` and `quota_mode` cannot be combined; remove one of them",
                ));
            }
            (true, false) => EnvoyMode::Shadow,
            (false, true) => EnvoyMode::Quota,
            (false, false) => EnvoyMode::Enforced,
        };
        let is_shared = fields.flag("share_threshold")?;
        if is_shared && !Glob::is_open(value.unwrap_or(key)) {
            return Err(fields.place("share_threshold").error(
                "`share_threshold` needs a `value` that contains `*`; add a `*`, or remove `share_threshold`",
            ));
        }
        let detailed_metric = fields.flag("detailed_metric")?;
        if let Some(metadata) = fields.get("metadata") {
            self.warn(metadata.place, "`metadata` has no effect: responses do not contain it");
        }
        let limit = match fields.get("rate_limit") {
            None => None,
            Some(limit) => Some(Arc::new(self.limit(limit, mode, detailed_metric)?)),
        };
        if limit.is_none() {
            // envoyproxy/ratelimit ignores them as well, so the file still works.
            for (field, is_set) in [
                ("shadow_mode", mode == EnvoyMode::Shadow),
                ("quota_mode", mode == EnvoyMode::Quota),
                ("detailed_metric", detailed_metric),
            ] {
                if is_set {
                    let warning =
                        format!("`{field}` has no effect on a descriptor without `rate_limit`");
                    self.warn(fields.place(field), &warning);
                }
            }
        }
        let mut next = Level::default();
        self.add_to(&mut next, fields.list("descriptors")?)?;
        if limit.is_none() && next.is_empty() {
            tracing::debug!(
                line = node.place.line,
                "a descriptor has neither `rate_limit` nor `descriptors`; its requests are not limited"
            );
        }
        let value_to_metric = fields.flag("value_to_metric")?;
        let (file, line) = (self.source.clone(), node.place.line);
        Ok(DescriptorRule { limit, next, is_shared, value_to_metric, file, line })
    }

    fn warn(&mut self, Place { line, .. }: Place, warning: &str) {
        self.warnings.push(format!("{}:{line}: {warning}", self.file));
    }

    fn limit(
        &mut self,
        node: &'a Node<'_>,
        mode: EnvoyMode,
        detailed_metric: bool,
    ) -> Result<EnvoyRule, YamlError> {
        let fields = Fields::of(node, &LIMIT_FIELDS)?;
        fields.warn_of_misplaced(self.file, self.warnings);
        let name = fields.text("name")?.filter(|name| !name.is_empty()).map(Box::from);
        let replaces = replaces(&fields, name.as_deref())?;
        let is_unlimited = fields.flag("unlimited")?;
        let unit = match fields.text("unit")? {
            Some(unit) if is_unlimited && Unit::of_name(unit).is_some() => {
                return Err(fields.place("unit").error(
                    "`unit` cannot be combined with `unlimited: true`; remove one of them",
                ));
            }
            // envoyproxy/ratelimit ignores an unknown unit here.
            _ if is_unlimited => Unit::Second,
            Some(unit) => Unit::of_name(unit).ok_or_else(|| {
                let known = "second, minute, hour, day, week, month or year";
                fields.place("unit").error(format!("unknown unit {unit:?}; use {known}"))
            })?,
            None => {
                return Err(node.error(
                    "`unit` is missing; use second, minute, hour, day, week, month or year",
                ));
            }
        };
        let requests_per_unit = match fields.number("requests_per_unit", u64::from(u32::MAX))? {
            Some(number) => u32::try_from(number).unwrap_or(u32::MAX),
            None if is_unlimited => 0,
            None => {
                self.warn(
                    node.place,
                    "`requests_per_unit` is missing, so every request is denied, as in envoyproxy/ratelimit; set it, or \
                     set it to 0 to say so",
                );
                0
            }
        };
        let unit_multiplier = match fields.number("unit_multiplier", u64::from(u32::MAX))? {
            Some(0) => {
                return Err(fields
                    .place("unit_multiplier")
                    .error("unit_multiplier must be at least 1 (got 0)"));
            }
            given => given.map_or(1, |number| u32::try_from(number).unwrap_or(u32::MAX)),
        };
        let limit = EnvoyLimit { requests_per_unit, unit, unit_multiplier };
        let most = LONGEST_TIME.as_secs() / unit.seconds();
        if u64::from(unit_multiplier) > most {
            let place = fields.place("unit_multiplier");
            return Err(place.error(format!(
                "unit_multiplier must be at most {most} with this unit (got {unit_multiplier}): a window has at most {}",
                DurationText(LONGEST_TIME)
            )));
        }
        let (on_failure, fails_without_store) = on_store_error(&fields)?;
        let kind = algorithm(&fields)?;
        let access = match requests_per_unit {
            _ if is_unlimited => Access::Unlimited,
            0 => Access::Blocked,
            _ => self.policy(node, &fields, kind, limit.quota())?.into(),
        };
        let store_only = fields.given(&["on_store_error", "instances"]);
        match access {
            Access::Limited(_) => {}
            Access::Unlimited | Access::Blocked => {
                self.warn_of_ineffective(&fields, is_unlimited, mode);
            }
        }
        let policy = policy_name(self.domain, &self.path);
        let is_open = |(key, value): &(&str, Option<&str>)| {
            Glob::is_open(key) || value.is_none_or(Glob::is_open)
        };
        let has_one_key = !self.path.iter().any(is_open);
        let redis_only = if matches!(access, Access::Limited(_)) { store_only } else { Vec::new() };
        let config =
            PolicyConfig { redis_only, ..PolicyConfig::of_envoy(access, on_failure, has_one_key) };
        add_policy(self.policies, &policy, config, node)?;
        Ok(EnvoyRule {
            policy,
            limit,
            is_unlimited,
            name,
            replaces,
            mode,
            fails_without_store,
            detailed_metric,
            is_looked_at: AtomicBool::default(),
        })
    }

    /// Warns about fields that have no effect, because the store is never asked.
    fn warn_of_ineffective(&mut self, fields: &Fields<'_>, is_unlimited: bool, mode: EnvoyMode) {
        let mut ineffective = fields.given(&[
            "requests_per_unit",
            "unit",
            "algorithm",
            "burst",
            "unit_multiplier",
            "on_store_error",
            "instances",
        ]);
        if !is_unlimited {
            // The response contains these.
            let in_response = ["requests_per_unit", "unit", "unit_multiplier"];
            ineffective.retain(|name| !in_response.contains(name));
        }
        let reason = if is_unlimited { "unlimited: true" } else { "requests_per_unit: 0" };
        for name in ineffective {
            let warning = format!("`{name}` has no effect with `{reason}`");
            self.warn(fields.place(name), &warning);
        }
        let mode = match mode {
            EnvoyMode::Enforced => return,
            EnvoyMode::Shadow => "shadow_mode",
            EnvoyMode::Quota => "quota_mode",
        };
        if is_unlimited {
            self.warn(fields.place, &format!("`{mode}` has no effect with `{reason}`"));
        }
    }

    fn policy(
        &self,
        node: &Node<'_>,
        fields: &Fields<'_>,
        kind: Kind,
        Quota { amount, window }: Quota,
    ) -> Result<Policy, YamlError> {
        let mut builder: LimitBuilder = Policy::of(kind, amount).per(window);
        if let Some(burst) = fields.number("burst", u64::MAX)? {
            builder = builder.burst(burst);
        }
        let name = policy_name(self.domain, &self.path);
        Policy::all_of(&*name, [builder]).map_err(|error| node.error(in_durations(&error)))
    }
}

const KINDS: [(&str, Kind); 6] = [
    ("fixed_window", Kind::FixedWindow),
    ("token_bucket", Kind::TokenBucket),
    ("gcra", Kind::Gcra),
    ("leaky_bucket", Kind::LeakyBucket),
    ("sliding_window_log", Kind::SlidingWindowLog),
    ("sliding_window_counter", Kind::SlidingWindowCounter),
];

fn algorithm(fields: &Fields<'_>) -> Result<Kind, YamlError> {
    let Some(name) = fields.text("algorithm")? else { return Ok(Kind::FixedWindow) };
    let found = KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
    found.ok_or_else(|| {
        let hint = match nearest(name, KINDS.iter().map(|(known, _)| *known)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("use {}", KINDS.map(|(known, _)| known).join(", ")),
        };
        fields.place("algorithm").error(format!("unknown algorithm {name:?}; {hint}"))
    })
}

/// Returns what the policy does while the store is unavailable, and whether the request fails instead.
fn on_store_error(fields: &Fields<'_>) -> Result<(OnFailure, bool), YamlError> {
    let instances = fields.number("instances", u64::from(u32::MAX))?;
    let given = fields.text("on_store_error")?;
    if instances.is_some() && given != Some("local") {
        return Err(fields
            .place("instances")
            .error("`instances` only works with `on_store_error: local`"));
    }
    match given {
        // The policy denies, so that nothing is charged, and the surface replies with an error.
        None | Some("error") => Ok((OnFailure::Deny, true)),
        Some("allow") => Ok((OnFailure::Allow, false)),
        Some("deny") => Ok((OnFailure::Deny, false)),
        Some("local") => match instances.and_then(|number| u32::try_from(number).ok()) {
            Some(instances @ 1..) => Ok((OnFailure::Local { instances }, false)),
            _ => Err(fields.place("on_store_error").error(
                "`on_store_error: local` divides the quota between servers; set `instances` to their number (at least 1)",
            )),
        },
        Some(other) => Err(fields
            .place("on_store_error")
            .error(format!("unknown value {other:?}; use error, allow, deny or local"))),
    }
}

fn replaces(fields: &Fields<'_>, own: Option<&str>) -> Result<Vec<Box<str>>, YamlError> {
    let mut names = Vec::new();
    for node in fields.list("replaces")? {
        let name = match Fields::of(node, &["name"])?.text("name")? {
            Some(name) if !name.is_empty() => name,
            _ => return Err(node.error("`name` is missing or empty; name the limit to replace")),
        };
        if own == Some(name) {
            return Err(node.error(format!("the limit {name:?} cannot replace itself")));
        }
        names.push(name.into());
    }
    Ok(names)
}

/// The fields of envoyproxy/ratelimit, and where they belong.
const HOMES: [(&str, &[&str]); 3] = [
    ("the top of the file", &["domain"]),
    ("a descriptor", &DESCRIPTOR_FIELDS),
    ("`rate_limit`", &["unit", "requests_per_unit", "unlimited", "name", "replaces"]),
];

fn home(field: &str) -> Option<&'static str> {
    HOMES.iter().find(|(_, fields)| fields.contains(&field)).map(|(home, _)| *home)
}

/// The fields of a map.
struct Fields<'a> {
    entries: Vec<(&'a str, &'a Node<'a>)>,
    /// Known fields that belong elsewhere.
    misplaced: Vec<(&'a str, Place)>,
    place: Place,
}

impl<'a> Fields<'a> {
    /// Checks that a node is a map, and that all its fields are known, here or elsewhere.
    fn of(node: &'a Node<'_>, known: &[&str]) -> Result<Self, YamlError> {
        let Content::Map(map) = &node.content else {
            let reason = format!("expected a map with {}, found {}", known.join(", "), node.kind());
            return Err(node.error(reason));
        };
        let (mut entries, mut misplaced) = (Vec::with_capacity(map.len()), Vec::new());
        for (key, value) in map {
            let Content::Scalar { text, .. } = &key.content else {
                return Err(
                    key.error(format!("expected the name of a field, found {}", key.kind()))
                );
            };
            if !known.contains(&&**text) {
                if home(text).is_some() {
                    misplaced.push((&**text, key.place));
                    continue;
                }
                return Err(key.error(match nearest(text, known.iter().copied()) {
                    Some(near) => format!("unknown field `{text}`; did you mean `{near}`?"),
                    None => format!("unknown field `{text}`; expected one of {}", known.join(", ")),
                }));
            }
            entries.push((&**text, value));
        }
        Ok(Self { entries, misplaced, place: node.place })
    }

    fn warn_of_misplaced(&self, file: &str, warnings: &mut Vec<String>) {
        for (field, Place { line, .. }) in &self.misplaced {
            let home = home(field).unwrap_or("another place");
            warnings.push(format!(
                "{file}:{line}: `{field}` has no effect here, as in envoyproxy/ratelimit; it belongs to {home}"
            ));
        }
    }

    /// Returns the value of a field, unless it is missing or null.
    fn get(&self, name: &str) -> Option<&'a Node<'a>> {
        let found = self.entries.iter().find(|(field, _)| *field == name);
        found.map(|(_, value)| *value).filter(|value| !value.is_null())
    }

    /// Returns which of some fields have a value.
    fn given(&self, names: &[&'static str]) -> Vec<&'static str> {
        let has_value = |name: &&str| {
            self.get(name).is_some_and(
                |node| !matches!(&node.content, Content::Scalar { text, .. } if text.is_empty()),
            )
        };
        names.iter().copied().filter(has_value).collect()
    }

    /// Returns the place of a field, or of the map.
    fn place(&self, name: &str) -> Place {
        self.get(name).map_or(self.place, |value| value.place)
    }

    /// Returns the text of a scalar as it is written: `404` and `true` are texts as well.
    fn text(&self, name: &str) -> Result<Option<&'a str>, YamlError> {
        match self.get(name) {
            None => Ok(None),
            Some(Node { content: Content::Scalar { text, .. }, .. }) => Ok(Some(text)),
            Some(node) => {
                Err(node.error(format!("`{name}` must be a text, found {}", node.kind())))
            }
        }
    }

    fn flag(&self, name: &str) -> Result<bool, YamlError> {
        match self.text(name)? {
            None => Ok(false),
            Some(text) => match text.to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "y" => Ok(true),
                "false" | "no" | "off" | "n" => Ok(false),
                _ => Err(self
                    .place(name)
                    .error(format!("`{name}` must be true or false (got {text:?})"))),
            },
        }
    }

    fn number(&self, name: &str, most: u64) -> Result<Option<u64>, YamlError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match whole_number(text) {
            Some(number) if number <= most => Ok(Some(number)),
            _ => Err(self
                .place(name)
                .error(format!("`{name}` must be a whole number from 0 to {most} (got {text:?})"))),
        }
    }

    fn list(&self, name: &str) -> Result<&'a [Node<'a>], YamlError> {
        match self.get(name) {
            None => Ok(&[]),
            Some(Node { content: Content::List(items), .. }) => Ok(items),
            Some(node) => {
                Err(node.error(format!("`{name}` must be a list, found {}", node.kind())))
            }
        }
    }
}

/// Parses a number as envoyproxy/ratelimit's YAML library does: `1_000`, `0x10`, `0b11`, and `017`, which is octal.
fn whole_number(text: &str) -> Option<u64> {
    if !text.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    let digits = text.replace('_', "").to_ascii_lowercase();
    let (digits, radix) = match digits.as_bytes() {
        [b'0', b'x', ..] => (&digits[2..], 16),
        [b'0', b'o', ..] => (&digits[2..], 8),
        [b'0', b'b', ..] => (&digits[2..], 2),
        [b'0', _, ..] => (&digits[1..], 8),
        _ => (&*digits, 10),
    };
    // `from_str_radix` accepts a sign.
    let has_sign = digits.starts_with(['+', '-']);
    u64::from_str_radix(digits, radix).ok().filter(|_| !has_sign)
}

impl PolicyConfig {
    fn of_envoy(access: Access, on_failure: OnFailure, has_one_key: bool) -> Self {
        Self {
            tiers: Tiers::new(access),
            cost: 1,
            key: KeySource::default(),
            ipv6_prefix: 64,
            on_failure,
            instances: None,
            lease: None,
            deny_cache: true,
            has_one_key,
            takes_request_limits: true,
            redis_only: Vec::new(),
        }
    }
}

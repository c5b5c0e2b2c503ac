//! Finds the server of a key, and follows redirections.
//!
//! The cluster client of the `redis` crate sends a call again when a connection breaks, which would charge twice; if
//! that is turned off, it does not follow redirections either. So redirections are followed here: a call that was
//! answered with MOVED or ASK was not carried out, and is sent to the server that the reply names. A call that was
//! answered with TRYAGAIN was not carried out either, and is repeated within its time budget. A call whose reply was lost
//! is never sent again.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use redis::{
    Cmd, ConnectionInfo, ErrorKind, RedisConnectionInfo, RedisError, ServerErrorKind, Value,
};

use crate::address::{Address, Shape};
use crate::counts::Counters;
use crate::link::Failure;
use crate::node::Node;
use crate::options::Options;

/// The known servers and their slots.
#[derive(Debug)]
pub(crate) struct Routes {
    address: Address,
    options: Options,
    counters: Arc<Counters>,
    nodes: Mutex<HashMap<(String, u16), Arc<Node>>>,
    /// The server of all keys, without a cluster.
    only: ArcSwapOption<Node>,
    /// In a cluster: the server of each slot.
    slots: Mutex<Slots>,
    is_asking: AtomicBool,
    asked: Mutex<Option<Instant>>,
    /// When an unavailable server was last replaced by another.
    failed_over: Mutex<Option<Instant>>,
}

/// Ranges of slots, each with its server.
#[derive(Debug, Default)]
struct Slots {
    ranges: Vec<(u16, u16, Arc<Node>)>,
    /// Slots that were found on another server since.
    moved: HashMap<u16, Arc<Node>>,
}

/// How many redirections a call follows without a pause. While the servers disagree about a slot that moves, they redirect
/// a call to each other.
const PROMPT_REDIRECTIONS: u32 = 5;
/// The pause before each further redirection.
const REDIRECTION_PAUSE: Duration = Duration::from_millis(2);
/// The pause before a call on several keys is sent again whose slot is moving.
const TRY_AGAIN_PAUSE: Duration = Duration::from_millis(5);
/// The shortest time between two refreshes of the topology.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How long a refresh may take: only the first decision waits for it.
const MAP_BUDGET: Duration = Duration::from_millis(500);

impl Routes {
    pub(crate) fn new(
        address: Address,
        options: Options,
        counters: Arc<Counters>,
    ) -> Result<Self, RedisError> {
        let only = match address.shape {
            Shape::One => Some(Arc::new(Node::new(address.template.clone(), &options, &counters)?)),
            Shape::Cluster { .. } | Shape::Sentinel { .. } => None,
        };
        Ok(Self {
            address,
            options,
            counters,
            nodes: Mutex::default(),
            only: ArcSwapOption::new(only),
            slots: Mutex::default(),
            is_asking: AtomicBool::new(false),
            asked: Mutex::new(None),
            failed_over: Mutex::new(None),
        })
    }

    pub(crate) const fn is_cluster(&self) -> bool {
        matches!(self.address.shape, Shape::Cluster { .. })
    }

    /// Returns whether the circuit breaker of a server that has keys is open.
    pub(crate) fn is_open(&self) -> bool {
        if !self.is_cluster() {
            return self.only.load().as_ref().is_some_and(|node| node.is_open());
        }
        let slots = lock(&self.slots);
        slots.ranges.iter().any(|(_, _, node)| node.is_open())
            || slots.moved.values().any(|node| node.is_open())
    }

    /// Returns whether the server of a slot was working since a time: see [`Node::is_busy_since`].
    pub(crate) fn is_busy_since(&self, slot: u16, since: Instant) -> bool {
        self.known(slot).is_some_and(|node| node.is_busy_since(since))
    }

    /// Returns whether the server of a slot was unavailable at some time since a given time: see [`Node::was_open_since`];
    /// or has replaced one that was.
    pub(crate) fn was_open_since(&self, slot: u16, since: Instant) -> bool {
        self.known(slot).is_some_and(|node| node.was_open_since(since))
            || lock(&self.failed_over).is_some_and(|when| when >= since)
    }

    /// Keeps only the servers that have keys.
    fn keep_nodes(&self, has_keys: impl Fn(&Arc<Node>) -> bool) {
        let mut is_failover = false;
        lock(&self.nodes).retain(|_, node| {
            let stays = has_keys(node);
            is_failover |= !stays && node.is_open();
            stays
        });
        if is_failover {
            *lock(&self.failed_over) = Some(Instant::now());
        }
    }

    /// Returns whether the server of a slot is known to have a script.
    pub(crate) fn has_script(&self, slot: u16, script: u64) -> bool {
        if !self.is_cluster() {
            return self.only.load().as_ref().is_some_and(|node| node.scripts.has(script));
        }
        self.known(slot).is_some_and(|node| node.scripts.has(script))
    }

    /// Records that the server of a slot has a script, or gets it before the next call.
    pub(crate) fn loaded_script(&self, slot: u16, script: u64) {
        if let Some(node) = self.known(slot) {
            node.scripts.add(script);
        }
    }

    /// Records that the server of a slot may not have a script.
    pub(crate) fn forget_script(&self, slot: u16, script: u64) {
        if let Some(node) = self.known(slot) {
            node.scripts.remove(script);
        }
    }

    /// Sends a command that concerns a slot, and waits for its reply.
    pub(crate) async fn send(
        self: &Arc<Self>,
        slot: u16,
        command: impl Into<Arc<Cmd>>,
        deadline: Instant,
    ) -> Result<Value, Failure> {
        let command = command.into();
        let mut node = self.node_of(slot, deadline).await?;
        let mut is_moving = false;
        let mut redirections = 0;
        loop {
            let failure = match node.send(&command, is_moving, deadline).await {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            let Failure::ErrorReply(error) = &failure else {
                if !matches!(failure, Failure::Late { .. }) {
                    self.ask_for_map();
                    if node.is_open() {
                        node.keep_probing();
                    }
                }
                return Err(failure);
            };
            match error.kind() {
                ErrorKind::Server(kind @ (ServerErrorKind::Moved | ServerErrorKind::Ask)) => {
                    self.counters.redirections.fetch_add(1, Ordering::Relaxed);
                    redirections += 1;
                    if redirections > PROMPT_REDIRECTIONS {
                        if Instant::now() + REDIRECTION_PAUSE >= deadline {
                            return Err(Failure::NotSent(
                                "the servers of the cluster disagree about the slot of the key"
                                    .into(),
                            ));
                        }
                        tokio::time::sleep(REDIRECTION_PAUSE).await;
                    }
                    is_moving = kind == ServerErrorKind::Ask;
                    let Some(other) = self.named_in(error) else { return Err(failure) };
                    node = other;
                    if !is_moving {
                        lock(&self.slots).moved.insert(slot, node.clone());
                        self.ask_for_map();
                    }
                }
                // Some keys of a moving slot are on one server and some on another, and the call was not carried out.
                ErrorKind::Server(ServerErrorKind::TryAgain)
                    if Instant::now() + TRY_AGAIN_PAUSE < deadline =>
                {
                    tokio::time::sleep(TRY_AGAIN_PAUSE).await;
                }
                ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => {
                    // The address may lead to another server by now.
                    node.reconnect();
                    self.ask_for_map();
                    return Err(failure);
                }
                ErrorKind::Server(ServerErrorKind::ClusterDown) => {
                    self.ask_for_map();
                    return Err(failure);
                }
                _ => return Err(failure),
            }
        }
    }

    async fn node_of(self: &Arc<Self>, slot: u16, deadline: Instant) -> Result<Arc<Node>, Failure> {
        loop {
            if let Some(node) = self.known(slot) {
                return Ok(node);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(found) = tokio::time::timeout(left, self.read_map()).await else {
                return Err(Failure::NotSent("the cluster topology is not known yet".into()));
            };
            found?;
            if self.known(slot).is_none() {
                return Err(Failure::NotSent("no server serves the slot of the key".into()));
            }
        }
    }

    fn known(&self, slot: u16) -> Option<Arc<Node>> {
        if !self.is_cluster() {
            return self.only.load_full();
        }
        let slots = lock(&self.slots);
        let range = || slots.ranges.iter().find(|(from, to, _)| (*from..=*to).contains(&slot));
        slots.moved.get(&slot).or_else(|| range().map(|(_, _, node)| node)).cloned()
    }

    /// Returns the server that a redirection names.
    fn named_in(&self, error: &RedisError) -> Option<Arc<Node>> {
        let (address, _) = error.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        self.node(host, port.parse().ok()?).ok()
    }

    fn node(&self, host: &str, port: u16) -> Result<Arc<Node>, Failure> {
        let mut nodes = lock(&self.nodes);
        if let Some(node) = nodes.get(&(host.to_owned(), port)) {
            return Ok(node.clone());
        }
        let info = self.address.to(host, port);
        let node = Node::new(info, &self.options, &self.counters).map_err(Failure::ErrorReply)?;
        let node = Arc::new(node);
        nodes.insert((host.to_owned(), port), node.clone());
        Ok(node)
    }

    /// Refreshes the topology in the background, unless that is under way or was just done.
    fn ask_for_map(self: &Arc<Self>) {
        if matches!(self.address.shape, Shape::One) {
            return;
        }
        let now = Instant::now();
        let mut asked = lock(&self.asked);
        let is_recent = asked.is_some_and(|asked| now.duration_since(asked) < ASK_AGAIN_AFTER);
        if is_recent || self.is_asking.swap(true, Ordering::AcqRel) {
            return;
        }
        *asked = Some(now);
        drop(asked);
        let routes = self.clone();
        tokio::spawn(async move {
            let read = tokio::time::timeout(MAP_BUDGET, routes.read_map()).await;
            routes.is_asking.store(false, Ordering::Release);
            let error = match read {
                Ok(Ok(())) => return,
                Ok(Err(failure)) => failure.to_string(),
                Err(_) => format!("no reply within {} ms", MAP_BUDGET.as_millis()),
            };
            let address = &routes.address;
            tracing::warn!(%address, error, "redis topology refresh failed; keeping the previous topology");
        });
    }

    async fn read_map(self: &Arc<Self>) -> Result<(), Failure> {
        match &self.address.shape {
            Shape::One => Ok(()),
            Shape::Cluster { seeds } => self.read_slots(seeds).await,
            Shape::Sentinel { sentinels, name } => self.find_primary(sentinels, name).await,
        }
    }

    /// Reads the slots from the known servers, then from the configured ones.
    async fn read_slots(&self, seeds: &[(String, u16)]) -> Result<(), Failure> {
        let mut known: Vec<_> = lock(&self.nodes).keys().cloned().collect();
        known.extend(seeds.iter().cloned());
        let mut last = Failure::NotSent("no server is configured".into());
        for (host, port) in known {
            let node = self.node(&host, port)?;
            let command = Arc::new(redis::cmd("CLUSTER").arg("SLOTS").take());
            match node.send(&command, false, Instant::now() + self.options.budget * 2).await {
                Ok(reply) => {
                    let ranges = self.ranges(&reply, &host);
                    if !ranges.is_empty() {
                        // Servers without slots are dropped, together with their circuit breakers.
                        self.keep_nodes(|node| {
                            ranges.iter().any(|(_, _, other)| Arc::ptr_eq(node, other))
                        });
                        *lock(&self.slots) = Slots { ranges, moved: HashMap::new() };
                        return Ok(());
                    }
                }
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    fn ranges(&self, reply: &Value, asked: &str) -> Vec<(u16, u16, Arc<Node>)> {
        let Value::Array(ranges) = reply else { return Vec::new() };
        let read = |range: &Value| {
            let Value::Array(fields) = range else { return None };
            let [Value::Int(from), Value::Int(to), Value::Array(primary), ..] = &fields[..] else {
                return None;
            };
            let (host, port) = (text(primary.first()?)?, primary.get(1)?);
            let Value::Int(port) = port else { return None };
            // An empty host means the server that was asked.
            let host = if host.is_empty() { asked.to_owned() } else { host };
            let node = self.node(&host, u16::try_from(*port).ok()?).ok()?;
            Some((u16::try_from(*from).ok()?, u16::try_from(*to).ok()?, node))
        };
        ranges.iter().filter_map(read).collect()
    }

    /// Asks the sentinels in turn for the address of the primary.
    async fn find_primary(&self, sentinels: &[(String, u16)], name: &str) -> Result<(), Failure> {
        let mut last = Failure::NotSent("no sentinel is configured".into());
        for (host, port) in sentinels {
            let info = self.sentinel(host, *port);
            let sentinel =
                Node::new(info, &self.options, &self.counters).map_err(Failure::ErrorReply)?;
            let mut command = redis::cmd("SENTINEL");
            command.arg("get-master-addr-by-name").arg(name);
            let budget = self.options.budget * 2;
            match sentinel.send(&Arc::new(command), false, Instant::now() + budget).await {
                Ok(Value::Array(found)) => {
                    let host = found.first().and_then(text);
                    let port = found.get(1).and_then(text).and_then(|port| port.parse().ok());
                    if let (Some(host), Some(port)) = (host, port) {
                        let primary = self.node(&host, port)?;
                        self.keep_nodes(|node| Arc::ptr_eq(node, &primary));
                        self.only.store(Some(primary));
                        return Ok(());
                    }
                }
                Ok(_) => {
                    last = Failure::NotSent(format!("no sentinel knows a primary {name:?}").into());
                }
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }

    /// Returns how to connect to a sentinel, which has no databases and no password of the servers.
    fn sentinel(&self, host: &str, port: u16) -> ConnectionInfo {
        self.address.to(host, port).set_redis_settings(RedisConnectionInfo::default())
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}

fn lock<T: fmt::Debug>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

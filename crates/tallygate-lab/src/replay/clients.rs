//! Clients by name: each gets a number when it first comes.
//!
//! Names are hashed as they are read and looked up in batches, so that the processor waits for many
//! cache misses at once and not for one after the other. Backtests know their clients in the same way.

use std::hash::BuildHasher as _;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tallygate_core::{Cost, Tick};

/// How many requests are looked up together.
const BATCH: usize = 256;

/// All clients so far.
#[derive(Default)]
pub(crate) struct Clients {
    hasher: RandomState,
    table: HashTable<Client>,
    /// All names, one after the other.
    names: Vec<u8>,
}

struct Client {
    hash: u64,
    number: usize,
    name_start: usize,
    name_length: usize,
}

/// A request whose client has a number.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) client: usize,
    pub(crate) now: Tick,
    pub(crate) cost: Cost,
}

/// Requests on the way to being decided together.
#[derive(Default)]
pub(super) struct Batch<'line> {
    names: Vec<(&'line [u8], u64)>,
    requests: Vec<Request>,
    resolved: bool,
}

impl Clients {
    /// How names are hashed.
    pub(crate) fn hasher(&self) -> RandomState {
        self.hasher.clone()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// How long all names are together.
    pub(crate) fn name_bytes(&self) -> usize {
        self.names.len()
    }

    /// All names, by number.
    pub(crate) fn names(&self) -> Vec<&[u8]> {
        let mut names = vec![&[][..]; self.table.len()];
        for client in &self.table {
            names[client.number] =
                &self.names[client.name_start..client.name_start + client.name_length];
        }
        names
    }

    /// The number of a client, by its name and the hash of that: the next one if it is new.
    pub(crate) fn number(&mut self, name: &[u8], hash: u64) -> usize {
        let Self { table, names, .. } = self;
        let is_it = |client: &Client| {
            client.hash == hash
                && &names[client.name_start..client.name_start + client.name_length] == name
        };
        if let Some(client) = table.find(hash, is_it) {
            return client.number;
        }
        let number = table.len();
        let client = Client { hash, number, name_start: names.len(), name_length: name.len() };
        names.extend_from_slice(name);
        table.insert_unique(hash, client, |client| client.hash);
        number
    }
}

impl<'line> Batch<'line> {
    pub(super) const fn is_full(&self) -> bool {
        self.names.len() >= BATCH
    }

    /// Adds a request; a batch that has been resolved starts anew.
    #[inline]
    pub(super) fn add(&mut self, clients: &Clients, name: &'line [u8], now: Tick, cost: Cost) {
        if self.resolved {
            self.names.clear();
            self.requests.clear();
            self.resolved = false;
        }
        self.names.push((name, clients.hasher.hash_one(name)));
        self.requests.push(Request { client: 0, now, cost });
    }

    /// The requests, with their clients' numbers.
    pub(super) fn resolve(&mut self, clients: &mut Clients) -> &[Request] {
        for (request, (name, hash)) in self.requests.iter_mut().zip(&self.names) {
            request.client = clients.number(name, *hash);
        }
        self.resolved = true;
        &self.requests
    }
}

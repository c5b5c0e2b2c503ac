//! Gives every client a number, in the order in which clients first appear.
//!
//! Names are hashed as they are read and looked up in batches, so that the processor waits for many cache misses at once.
//! Backtests number their clients in the same way.

use std::hash::BuildHasher as _;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use tallygate_core::{Cost, Tick};

/// The number of requests that are looked up together.
const BATCH: usize = 256;

/// All clients seen so far.
#[derive(Default)]
pub(crate) struct Clients {
    hasher: RandomState,
    table: HashTable<ClientEntry>,
    /// All names, concatenated.
    names: Vec<u8>,
}

struct ClientEntry {
    hash: u64,
    number: usize,
    name_start: usize,
    name_length: usize,
}

/// A request, with its client's number.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) client: usize,
    pub(crate) now: Tick,
    pub(crate) cost: Cost,
}

/// Requests that are decided together.
#[derive(Default)]
pub(super) struct RequestBatch<'line> {
    names: Vec<(&'line [u8], u64)>,
    requests: Vec<Request>,
}

impl Clients {
    /// Returns the hasher of names.
    pub(crate) fn hasher(&self) -> RandomState {
        self.hasher.clone()
    }

    /// Returns the number of clients.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Returns the total length of all names.
    pub(crate) fn name_bytes(&self) -> usize {
        self.names.len()
    }

    /// Returns all names, in the order of their numbers.
    pub(crate) fn names(&self) -> Vec<&[u8]> {
        let mut names = vec![&[][..]; self.table.len()];
        for client in &self.table {
            names[client.number] =
                &self.names[client.name_start..client.name_start + client.name_length];
        }
        names
    }

    /// Returns the number of the client with this name. A new client gets the next number.
    pub(super) fn number_of(&mut self, name: &[u8]) -> usize {
        let hash = self.hasher.hash_one(name);
        self.number(name, hash)
    }

    /// Returns the number of the client with this name and hash of the name. A new client gets the next number.
    pub(crate) fn number(&mut self, name: &[u8], hash: u64) -> usize {
        let Self { table, names, .. } = self;
        let has_name = |client: &ClientEntry| {
            client.hash == hash
                && &names[client.name_start..client.name_start + client.name_length] == name
        };
        if let Some(client) = table.find(hash, has_name) {
            return client.number;
        }
        let number = table.len();
        let client = ClientEntry { hash, number, name_start: names.len(), name_length: name.len() };
        names.extend_from_slice(name);
        table.insert_unique(hash, client, |client| client.hash);
        number
    }
}

impl<'line> RequestBatch<'line> {
    pub(super) const fn is_full(&self) -> bool {
        self.names.len() >= BATCH
    }

    #[inline]
    pub(super) fn add(&mut self, clients: &Clients, name: &'line [u8], now: Tick, cost: Cost) {
        self.names.push((name, clients.hasher.hash_one(name)));
        self.requests.push(Request { client: 0, now, cost });
    }

    /// Finds the clients of the requests, decides the requests in order, and empties the batch.
    pub(super) fn decide(
        &mut self,
        clients: &mut Clients,
        decide: impl FnOnce(&[Request]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for (request, (name, hash)) in self.requests.iter_mut().zip(&self.names) {
            request.client = clients.number(name, *hash);
        }
        let result = decide(&self.requests);
        self.names.clear();
        self.requests.clear();
        result
    }
}

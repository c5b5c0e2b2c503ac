//! Measures the time to save and to read a snapshot, and its size.
//!
//! Every client has one bucket, as in a server with tiers. The file is written to the given folder, or to the system's
//! folder for temporary files, and synced to disk.

use std::sync::Arc;
use std::time::Instant;

use tallygate::clock::SystemClock;
use tallygate::snapshot::{SnapshotReader, save_snapshot};
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::Access;
use tallygate::{Policy, RateLimiter, Tiers};
use tallygate_bench::workload::{name, scaled};

const SIZES: [usize; 2] = [1_000_000, 10_000_000];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, Into::into);
    let path = folder.join(format!("tallygate-bench-snapshot-{}", std::process::id()));
    println!("{:>12} {:>9} {:>9} {:>12} {:>6}", "clients", "save s", "read s", "bytes", "/key");
    for size in SIZES.map(scaled) {
        let policy = Arc::new(Policy::token_bucket(100).per_hour().build()?);
        let tiers = || Tiers::new(Access::Limited(policy.clone()));
        let capacity = Capacity::of(size + size / 8);
        let store = MemoryStore::new(capacity, SystemClock::new());
        let limiter = RateLimiter::in_store("api", tiers(), store);
        for key in 0..size {
            assert!(limiter.is_allowed(&name(key))?);
        }
        let started = Instant::now();
        let mut saved = 0;
        let bytes = save_snapshot(&path, |snapshot| {
            saved = limiter.store().save("api", &[], snapshot)?;
            Ok(())
        })?;
        let save_s = started.elapsed().as_secs_f64();
        assert_eq!(saved, size as u64);
        drop(limiter);

        let started = Instant::now();
        let mut snapshot = SnapshotReader::open(&path)?.ok_or("the snapshot does not exist")?;
        let mut section = snapshot.next_section()?.ok_or("the snapshot has no section")?;
        let share = |saved: Policy| if saved == *policy { policy.clone() } else { saved.into() };
        let store = MemoryStore::restored(capacity, SystemClock::new(), &mut section, share)?;
        assert!(snapshot.next_section()?.is_none());
        let read_s = started.elapsed().as_secs_f64();
        let restored = RateLimiter::in_store("api", tiers(), store);
        assert_eq!(restored.store().usage().keys, size);
        assert!(restored.check(&name(0))?.remaining <= 98);
        let each = bytes / size as u64;
        println!("{size:>12} {save_s:>9.2} {read_s:>9.2} {bytes:>12} {each:>6}");
    }
    std::fs::remove_file(&path)?;
    Ok(())
}

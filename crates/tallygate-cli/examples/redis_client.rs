//! Asks a Tallygate server with the crate `redis`, as the guide to other languages describes.
#![allow(clippy::print_stdout, reason = "the example prints what it learned")]

/// Returns whether the client `key` may send a request now.
pub(crate) fn check(connection: &mut redis::Connection, key: &str) -> redis::RedisResult<bool> {
    let [allowed, _limit, remaining, retry_ms, _reset_ms, _delay_ms]: [i64; 6] =
        redis::cmd("TG.CHECK").arg("api").arg(key).query(connection)?;
    println!("allowed: {allowed}, remaining: {remaining}, retry in {retry_ms} ms");
    Ok(allowed == 1)
}

fn main() -> redis::RedisResult<()> {
    let mut connection = redis::Client::open("redis://127.0.0.1:6380")?.get_connection()?;
    for _ in 0..3 {
        check(&mut connection, "rust")?;
    }
    Ok(())
}

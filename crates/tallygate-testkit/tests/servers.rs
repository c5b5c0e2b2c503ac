//! The harness of real servers works as the tests that use it expect.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use redis::Connection;
use tallygate_testkit::servers::{Cluster, Flavor, Proxy, Sentinel, Server, wait_until};

const SOON: Duration = Duration::from_secs(15);

fn connect(url: &str) -> Connection {
    let connection = redis::Client::open(url).and_then(|client| client.get_connection());
    let connection = connection.expect("a server accepts connections");
    connection.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout is accepted");
    connection
}

fn set(server: &Server, key: &str, value: &str) {
    server.ask::<()>(&["SET", key, value]);
}

fn value(server: &Server, key: &str) -> Option<String> {
    server.ask(&["GET", key])
}

fn role(server: &Server) -> String {
    server.info("replication").remove("role").expect("every server has a role")
}

fn is_alive(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}

/// Returns the folder of a server.
fn folder(server: &Server) -> PathBuf {
    let answer: Vec<String> = server.ask(&["CONFIG", "GET", "dir"]);
    PathBuf::from(&answer[1])
}

mod one_server {
    use super::*;

    #[test]
    fn of_each_flavor_starts_with_its_settings_and_leaves_nothing() {
        for flavor in Flavor::ALL {
            let server = Server::with(flavor, &["--maxmemory", "5mb"]);
            assert_eq!(server.ask::<String>(&["PING"]), "PONG");
            assert_eq!(server.ask::<Vec<String>>(&["CONFIG", "GET", "maxmemory"])[1], "5242880");
            assert_eq!(
                server.info("server").contains_key("valkey_version"),
                flavor == Flavor::Valkey
            );
            assert_eq!(server.flavor(), flavor);
            assert_eq!(server.url(), format!("redis://{}/", server.address()));
            assert!(server.command(&["NONSENSE"]).is_err());

            let (pid, folder) = (server.pid(), folder(&server));
            assert!(is_alive(pid) && folder.exists());
            drop(server);
            assert!(!is_alive(pid) && !folder.exists());
        }
    }

    #[test]
    fn comes_back_from_a_crash_on_its_port_without_its_data() {
        let server = Server::start(Flavor::Redis);
        set(&server, "key", "value");
        let (pid, port) = (server.pid(), server.port());
        server.kill();
        assert!(!server.is_running() && !is_alive(pid));
        assert!(server.command(&["PING"]).is_err());
        server.restart();
        assert!(server.is_running());
        assert_eq!((server.port(), value(&server, "key")), (port, None));
    }

    #[test]
    fn answers_nothing_while_frozen_and_everything_afterwards() {
        let server = Server::start(Flavor::Redis);
        let mut connection = connect(&server.url());
        connection.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        server.freeze();
        assert!(!server.is_running());
        redis::cmd("INCR").arg("key").query::<i64>(&mut connection).expect_err("it is frozen");
        server.thaw();
        wait_until("it did what it was sent", SOON, || value(&server, "key").is_some());
    }

    #[test]
    fn is_killed_even_when_frozen() {
        let server = Server::start(Flavor::Redis);
        let pid = server.pid();
        server.freeze();
        drop(server);
        assert!(!is_alive(pid));
    }

    #[test]
    fn lists_the_keys_without_an_expiry() {
        let server = Server::start(Flavor::Redis);
        let mut connection = server.connection().expect("it runs");
        let mut pipe = redis::pipe();
        for number in 0..3_000 {
            pipe.cmd("SET").arg(number).arg(1).arg("EX").arg(100).ignore();
        }
        pipe.cmd("SET").arg(b"\xff\0").arg(1).ignore();
        pipe.cmd("SET").arg("stays").arg(1).ignore();
        pipe.query::<()>(&mut connection).expect("it takes them");
        assert_eq!(server.keys_without_ttl(), [b"stays".to_vec(), b"\xff\0".to_vec()]);
    }

    #[test]
    fn serves_tls_to_clients_that_trust_its_authority() {
        let server = Server::with_tls(Flavor::Redis);
        let url = server.rediss_url();
        let port = url.trim_start_matches("rediss://127.0.0.1:").trim_end_matches('/');
        let ping = |authority: &str| {
            let answer = Command::new("redis-cli")
                .args(["-p", port, "--tls", "--cacert", authority, "PING"])
                .output()
                .expect("redis-cli is installed");
            String::from_utf8_lossy(&answer.stdout).trim().to_owned()
        };
        let other = Server::with_tls(Flavor::Redis);
        assert_eq!(ping(&server.ca_certificate().display().to_string()), "PONG");
        assert_ne!(ping(&other.ca_certificate().display().to_string()), "PONG");

        let verified = Command::new("openssl")
            .args(["verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", "127.0.0.1"])
            .arg("-CAfile")
            .arg(server.ca_certificate())
            .arg(server.ca_certificate().with_file_name("server.crt"))
            .output()
            .expect("openssl is installed");
        assert!(verified.status.success(), "{verified:?}");
    }
}

mod replication {
    use super::*;

    #[test]
    fn a_replica_follows_and_can_be_promoted() {
        let primary = Server::start(Flavor::Redis);
        set(&primary, "before", "1");
        let replica = Server::replica_of(&primary);
        set(&primary, "after", "2");
        replica.wait_until_caught_up_with(&primary);
        assert_eq!(value(&replica, "before").as_deref(), Some("1"));
        assert_eq!(value(&replica, "after").as_deref(), Some("2"));
        assert_eq!(role(&replica), "slave");
        replica.promote();
        assert_eq!(role(&replica), "master");
        set(&replica, "own", "3");
    }

    #[test]
    fn a_demoted_primary_rejects_writes_on_open_connections() {
        let (old, new) = (Server::start(Flavor::Redis), Server::start(Flavor::Redis));
        let mut connection = connect(&old.url());
        redis::cmd("SET").arg("key").arg(1).query::<()>(&mut connection).expect("a primary writes");
        old.demote_to(&new);
        let rejected = redis::cmd("SET").arg("key").arg(2).query::<()>(&mut connection);
        assert_eq!(rejected.expect_err("a replica rejects writes").code(), Some("READONLY"));
        old.wait_until_linked();
        assert_eq!(value(&old, "key"), None);
    }

    #[test]
    fn writes_during_paused_replication_are_lost_with_the_primary() {
        for flavor in Flavor::ALL {
            let primary = Server::start(flavor);
            let replica = Server::replica_of(&primary);
            set(&primary, "kept", "1");
            replica.wait_until_caught_up_with(&primary);
            replica.pause_replication();
            set(&primary, "lost", "1");
            // The replica tries to reconnect, and the primary rejects it.
            let turned_away = || replica.log().matches("Unable to AUTH").count();
            wait_until("the replica was turned away twice", SOON, || turned_away() >= 2);
            primary.kill();
            replica.promote();
            assert_eq!(value(&replica, "kept").as_deref(), Some("1"));
            assert_eq!(value(&replica, "lost"), None);
        }
    }

    #[test]
    fn replicas_come_back_when_replication_is_resumed() {
        let primary = Server::start(Flavor::Redis);
        let replica = Server::replica_of(&primary);
        replica.pause_replication();
        assert_eq!(replica.info("replication")["master_link_status"], "down");
        set(&primary, "late", "1");
        replica.resume_replication();
        replica.wait_until_caught_up_with(&primary);
        assert_eq!(value(&replica, "late").as_deref(), Some("1"));
    }
}

mod cluster {
    use super::*;

    #[test]
    fn of_each_flavor_fails_over_and_takes_its_old_primary_back() {
        for flavor in Flavor::ALL {
            let cluster = Cluster::start(flavor, 3, 1);
            assert_eq!((cluster.urls().len(), cluster.nodes().len()), (6, 6));
            let slot = cluster.slot_of("foo");
            assert_eq!(slot, 12_182);
            let primary = cluster.primary_of(slot);
            assert_eq!(primary, 2);
            let replica = cluster.replica_of(primary).expect("each primary has a replica");
            assert_eq!(replica, 5);
            set(&cluster.nodes()[primary], "foo", "bar");
            cluster.nodes()[replica].wait_until_caught_up_with(&cluster.nodes()[primary]);

            cluster.kill(primary);
            cluster.wait_until_ok(SOON);
            assert_eq!(cluster.primary_of(slot), replica);
            assert_eq!(cluster.replica_of(replica), None);
            assert_eq!(value(&cluster.nodes()[replica], "foo").as_deref(), Some("bar"));

            cluster.nodes()[primary].restart();
            wait_until("the old primary is a replica", SOON, || {
                cluster.replica_of(replica) == Some(primary)
            });
        }
    }

    #[test]
    fn of_each_flavor_moves_a_slot_step_by_step() {
        for flavor in Flavor::ALL {
            let cluster = Cluster::start(flavor, 3, 0);
            let slot = cluster.slot_of("{a}");
            let (from, to) = (cluster.primary_of(slot), (cluster.primary_of(slot) + 1) % 3);
            let (source, target) = (&cluster.nodes()[from], &cluster.nodes()[to]);
            set(source, "{a}1", "1");
            source.ask::<()>(&[b"SET".as_slice(), b"{a}\xff", b"1", b"EX", b"100"]);

            cluster.begin_migration(slot, to);
            assert_eq!(value(source, "{a}1").as_deref(), Some("1"));
            let absent = source.command(&["GET", "{a}2"]).expect_err("it may be on the other side");
            assert_eq!(absent.code(), Some("ASK"));
            let moving = target.command(&["GET", "{a}1"]).expect_err("it is not there yet");
            assert_eq!(moving.code(), Some("MOVED"));

            cluster.migrate_keys(slot, to);
            let moved = source.command(&["GET", "{a}1"]).expect_err("it is not here any more");
            assert_eq!(moved.code(), Some("ASK"));
            assert_eq!(cluster.primary_of(slot), from);
            assert_eq!(cluster.keys_without_ttl(), [b"{a}1"]);

            cluster.end_migration(slot, to);
            assert_eq!(cluster.primary_of(slot), to);
            assert_eq!(value(target, "{a}1").as_deref(), Some("1"));
            let moved = source.command(&["GET", "{a}1"]).expect_err("it is not here any more");
            assert_eq!(moved.code(), Some("MOVED"));

            cluster.migrate(slot, from);
            assert_eq!(value(source, "{a}1").as_deref(), Some("1"));
            cluster.wait_until_ok(SOON);
        }
    }
}

mod sentinel {
    use super::*;

    #[test]
    fn of_each_flavor_names_the_replica_when_the_primary_is_gone() {
        for flavor in Flavor::ALL {
            let watched = Sentinel::start(flavor, 1);
            assert_eq!((watched.name(), watched.urls().len()), ("main", 3));
            let old = watched.primary();
            assert_eq!(old, watched.servers()[0].address());
            watched.primary_server().kill();
            watched.wait_until_primary_is_not(&old, SOON);
            assert_eq!(watched.primary(), watched.servers()[1].address());
            set(watched.primary_server(), "key", "value");
        }
    }
}

mod proxy {
    use super::*;

    fn increment(connection: &mut Connection) -> redis::RedisResult<i64> {
        redis::cmd("INCR").arg("key").query(connection)
    }

    #[test]
    fn forwards_and_counts_connections() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let before = Instant::now();
        let (mut one, mut two) = (connect(&proxy.url()), connect(&proxy.url()));
        assert_eq!((increment(&mut one), increment(&mut two)), (Ok(1), Ok(2)));
        let large = "x".repeat(1_000_000);
        let echoed = redis::cmd("ECHO").arg(&large).query(&mut one);
        assert_eq!(echoed, Ok(large));
        assert_eq!(proxy.connections().len(), 2);
        assert!(proxy.connections().is_sorted() && proxy.connections()[0] > before);
    }

    #[test]
    fn loses_the_reply_to_a_completed_request() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let (mut one, mut two) = (connect(&proxy.url()), connect(&proxy.url()));
        proxy.lose_next_reply();
        increment(&mut one).expect_err("its reply is lost");
        assert_eq!(value(&server, "key").as_deref(), Some("1"));
        assert_eq!(proxy.replies_lost(), 1);
        assert_eq!(increment(&mut two), Ok(2), "only one connection breaks");

        // The greeting of the new connection is first, and gets its reply.
        proxy.lose_next_reply_to("INCR");
        let mut three = connect(&proxy.url());
        assert_eq!(redis::cmd("PING").query(&mut three), Ok("PONG".to_owned()));
        increment(&mut three).expect_err("its reply is lost");
        assert_eq!(value(&server, "key").as_deref(), Some("3"));
        assert_eq!(proxy.replies_lost(), 2);
    }

    #[test]
    fn loses_the_reply_only_after_all_earlier_requests_are_completed() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let mut connection = connect(&proxy.url());
        let mut pipe = redis::pipe();
        for _ in 0..20_000 {
            pipe.cmd("INCR").arg("key").ignore();
        }
        pipe.cmd("SET").arg("last").arg(1).ignore();
        proxy.lose_next_reply_to("last");
        pipe.query::<()>(&mut connection).expect_err("replies are lost");
        assert_eq!(value(&server, "key").as_deref(), Some("20000"));
        assert_eq!(value(&server, "last").as_deref(), Some("1"));
    }

    #[test]
    fn cuts_and_rejects_connections() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let mut connection = connect(&proxy.url());
        proxy.reject_connections(true);
        assert_eq!(increment(&mut connection), Ok(1), "present connections stay");
        proxy.cut();
        increment(&mut connection).expect_err("it is cut");
        let rejected = redis::Client::open(proxy.url())
            .and_then(|client| increment(&mut client.get_connection()?));
        rejected.expect_err("the proxy closes the connection");
        proxy.reject_connections(false);
        assert_eq!(increment(&mut connect(&proxy.url())), Ok(2));
        assert_eq!(proxy.connections().len(), 3);
    }

    #[test]
    fn forwards_nothing_while_stalled_and_everything_afterwards() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let (mut one, mut two) = (connect(&proxy.url()), connect(&proxy.url()));
        for connection in [&one, &two] {
            connection.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        }
        proxy.stall(true);
        increment(&mut one).expect_err("nothing comes through");
        increment(&mut two).expect_err("nothing comes through");
        assert_eq!(value(&server, "key"), None);
        proxy.stall(false);
        wait_until("it did what it was sent", SOON, || {
            value(&server, "key").as_deref() == Some("2")
        });
    }

    #[test]
    fn connects_new_connections_to_another_server() {
        let (one, two) = (Server::start(Flavor::Redis), Server::start(Flavor::Redis));
        let proxy = Proxy::start(&one.address());
        let mut connection = connect(&proxy.url());
        proxy.point_to(&two.address());
        assert_eq!(increment(&mut connection), Ok(1), "present connections stay");
        assert_eq!(value(&one, "key").as_deref(), Some("1"));
        assert_eq!(increment(&mut connect(&proxy.url())), Ok(1));
        assert_eq!(value(&two, "key").as_deref(), Some("1"));
    }

    #[test]
    fn breaks_its_connections_and_frees_its_port_when_dropped() {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let mut connection = connect(&proxy.url());
        connection.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
        proxy.stall(true);
        increment(&mut connection).expect_err("nothing comes through");
        let address = proxy.address();
        drop(proxy);
        increment(&mut connection).expect_err("the proxy is gone");
        std::net::TcpStream::connect(address).expect_err("no process listens on the port");
    }
}

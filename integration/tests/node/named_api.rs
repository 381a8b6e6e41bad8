//! An API server that has a name instead of an address, as on AKS.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use sluice_integration::scene::PATIENCE;
use sluice_proto::paths::BROKER_UID;
use sluice_testkit::netlink::RouteSocket;
use sluice_testkit::netns::Netns;
use sluice_testkit::node::Node;
use sluice_testkit::process::{Identity, Spawn, text};
use sluice_testkit::traffic::dns::DnsServer;
use sluice_testkit::wait::poll_true;

const NAME: &str = "api.sluice.test";

#[test]
fn the_broker_finds_an_api_server_by_its_name() {
    let node = Node::new().unwrap();
    let run = node.prepare_run_dir().unwrap();
    // The installer's directory, which a node of the tests has none of.
    let directory = run.root().join("node");
    std::fs::create_dir(&directory).unwrap();
    std::os::unix::fs::chown(&directory, Some(BROKER_UID), None).unwrap();
    let netns = Netns::new().unwrap();
    netns
        .run(|| RouteSocket::open().and_then(|route| route.set_up(1, true)))
        .unwrap();
    let place = node.place_with(&netns);
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
    let dns = DnsServer::start(&netns, server, Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST).unwrap();
    let resolver = node.dir().join("resolv.conf");
    std::fs::write(&resolver, "nameserver 127.0.0.1\n").unwrap();
    let resolver = resolver.to_str().unwrap();
    text(&place, "mount", &["--bind", resolver, "/etc/resolv.conf"], b"").unwrap();
    let kubeconfig = node.dir().join("kubeconfig");
    let content = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {
            "server": format!("https://{NAME}:6443"), "insecure-skip-tls-verify": true,
        }}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    });
    std::fs::write(&kubeconfig, content.to_string()).unwrap();

    let broker = Spawn::binary("ambient-broker")
        .unwrap()
        .args([
            "--kubernetes",
            "--node-name=n",
            "--pod-name=p",
            "--pod-namespace=ns",
            "--daemon-set=d",
        ])
        .arg("--kubeconfig")
        .arg(&kubeconfig)
        .arg("--run-dir")
        .arg(run.root())
        .place(place)
        .identity(Identity::user(BROKER_UID))
        .log(node.dir().join("ambient-broker.log"))
        .start()
        .unwrap();

    // Nobody listens there, which can only be known of an address.
    let refused = poll_true("the server's address was dialled", PATIENCE, || {
        broker.log_text().contains("Connection refused")
    });
    refused.unwrap_or_else(|late| panic!("{late}: {}", broker.log_text()));
    assert!(dns.queries() > 0);
}

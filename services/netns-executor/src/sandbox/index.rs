//! The sandboxes, and which of them a pod, a container or a namespace has: found in the same time however many there are.

use std::collections::btree_map::Values;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use sluice_proto::id::{Attachment, ContainerId, PodUid};
use sluice_proto::sandbox::NetnsIdentity;

use super::registry::Handle;

/// What sandboxes are looked for by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Pod(PodUid),
    Container(ContainerId),
    /// By cookie. Those of two boots may be equal, so whoever is found is compared.
    Netns(u64),
}

/// All sandboxes.
///
/// Invariant: `by_key` names exactly the sandboxes that have the key. A handle's attachment and pod never change, and
/// whatever changes its namespace goes through [`Sandboxes::update`].
#[derive(Debug, Default)]
pub(crate) struct Sandboxes {
    handles: BTreeMap<Attachment, Handle>,
    by_key: HashMap<Key, Vec<Attachment>>,
}

impl Sandboxes {
    pub(crate) fn len(&self) -> usize {
        self.handles.len()
    }

    /// In the order of their attachments.
    pub(crate) fn values(&self) -> Values<'_, Attachment, Handle> {
        self.handles.values()
    }

    pub(crate) fn get(&self, attachment: &Attachment) -> Option<&Handle> {
        self.handles.get(attachment)
    }

    /// Takes the place of what has the same attachment.
    pub(crate) fn insert(&mut self, handle: Handle) {
        self.remove(&handle.attachment);
        for key in keys(&handle) {
            self.enter(key, &handle.attachment);
        }
        self.handles.insert(handle.attachment.clone(), handle);
    }

    pub(crate) fn remove(&mut self, attachment: &Attachment) {
        if let Some(handle) = self.handles.remove(attachment) {
            for key in keys(&handle) {
                self.leave(&key, attachment);
            }
        }
    }

    /// Changes what is known of a sandbox, if there is one.
    pub(crate) fn update(&mut self, attachment: &Attachment, change: impl FnOnce(&mut Handle)) {
        let Some(handle) = self.handles.get_mut(attachment) else {
            return;
        };
        let before = handle.netns.cookie;
        change(handle);
        let now = handle.netns.cookie;
        if before != now {
            self.leave(&Key::Netns(before), attachment);
            self.enter(Key::Netns(now), attachment);
        }
    }

    /// Those of a pod.
    pub(crate) fn of_pod(&self, uid: &PodUid) -> impl Iterator<Item = &Handle> + use<'_> {
        self.with(Key::Pod(uid.clone()))
    }

    /// Those of a container.
    pub(crate) fn of_container(&self, id: &ContainerId) -> impl Iterator<Item = &Handle> + use<'_> {
        self.with(Key::Container(id.clone()))
    }

    /// Those in a namespace.
    pub(crate) fn in_netns(&self, netns: &NetnsIdentity) -> impl Iterator<Item = &Handle> {
        self.with(Key::Netns(netns.cookie))
            .filter(|handle| handle.netns.is_same_netns(netns))
    }

    /// Those of a container, of a pod or in a namespace, each once and in the order of their attachments.
    pub(crate) fn related(
        &self,
        container: &ContainerId,
        pod: &PodUid,
        netns: &NetnsIdentity,
    ) -> impl Iterator<Item = &Handle> {
        let all = self.of_container(container).chain(self.of_pod(pod));
        let attachments: BTreeSet<_> = all
            .chain(self.in_netns(netns))
            .map(|handle| &handle.attachment)
            .collect();
        attachments
            .into_iter()
            .filter_map(|attachment| self.handles.get(attachment))
    }

    #[expect(clippy::needless_pass_by_value, reason = "what is found does not borrow it")]
    fn with(&self, key: Key) -> impl Iterator<Item = &Handle> + use<'_> {
        let attachments = self.by_key.get(&key).into_iter().flatten();
        attachments.filter_map(|attachment| self.handles.get(attachment))
    }

    fn enter(&mut self, key: Key, attachment: &Attachment) {
        self.by_key.entry(key).or_default().push(attachment.clone());
    }

    fn leave(&mut self, key: &Key, attachment: &Attachment) {
        if let Some(attachments) = self.by_key.get_mut(key) {
            attachments.retain(|other| other != attachment);
            if attachments.is_empty() {
                self.by_key.remove(key);
            }
        }
    }
}

fn keys(handle: &Handle) -> [Key; 3] {
    [
        Key::Pod(handle.pod.uid.clone()),
        Key::Container(handle.attachment.container_id.clone()),
        Key::Netns(handle.netns.cookie),
    ]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tokio::sync::mpsc;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::table::Record;

    /// Of one of three containers, interfaces, pods and namespaces.
    fn handle(container: u8, interface: u8, pod: u8, cookie: u64) -> Handle {
        let Record {
            mut attachment,
            pod: mut reference,
            mut netns,
            ..
        } = crate::table::tests::record("one");
        attachment.container_id = ContainerId::parse(format!("c{container}")).unwrap();
        attachment.ifname = sluice_proto::id::InterfaceName::parse(format!("eth{interface}")).unwrap();
        reference.uid = PodUid::parse(format!("u-{pod}")).unwrap();
        netns.cookie = cookie;
        Handle {
            attachment,
            generation: 0,
            pod: reference,
            addresses: Vec::new(),
            added_unix_ms: 0,
            netns,
            descriptor: None,
            ending: false,
            sender: mpsc::unbounded_channel().0,
            slot: Arc::default(),
            ended: CancellationToken::new(),
        }
    }

    proptest! {
        #[test]
        fn the_index_finds_what_a_walk_finds(
            steps in proptest::collection::vec((0..3_u8, 0..3_u8, 0..3_u8, 0..3_u8, 0..3_u64), 1..40)
        ) {
            let mut sandboxes = Sandboxes::default();
            for (what, container, interface, pod, cookie) in steps {
                let new = handle(container, interface, pod, cookie);
                match what {
                    0 => sandboxes.insert(new.clone()),
                    1 => sandboxes.remove(&new.attachment),
                    _ => sandboxes.update(&new.attachment, |handle| handle.netns.cookie = cookie),
                }
                let (id, uid, netns) = (&new.attachment.container_id, &new.pod.uid, &new.netns);
                let walk: Vec<_> = sandboxes
                    .values()
                    .filter(|h| h.is_for(id) || h.pod.uid == *uid || h.netns.is_same_netns(netns))
                    .map(|h| &h.attachment)
                    .collect();
                let found: Vec<_> = sandboxes.related(id, uid, netns).map(|h| &h.attachment).collect();
                prop_assert_eq!(found, walk);
                let entries: usize = sandboxes.by_key.values().map(Vec::len).sum();
                prop_assert_eq!(entries, 3 * sandboxes.len());
            }
        }
    }
}

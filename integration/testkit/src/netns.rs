//! The one module that makes and enters namespaces. Entering is per thread: closures run on a throwaway thread
//! that ends inside, processes enter between fork and exec.
#![expect(unsafe_code, reason = "SO_NETNS_COOKIE has no safe wrapper")]
#![expect(clippy::disallowed_methods, reason = "the one netns module of the testkit")]

use std::cmp::Ordering;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::mount::{MntFlags, MsFlags};
use nix::sched::{CloneFlags, setns, unshare};

/// `SO_NETNS_COOKIE` (include/uapi/asm-generic/socket.h).
const SO_NETNS_COOKIE: libc::c_int = 71;

/// A network namespace, kept alive by its descriptor. Clones share the descriptor.
#[derive(Debug, Clone)]
pub struct Netns(Arc<OwnedFd>);

impl Netns {
    /// A new namespace; `lo` is down.
    pub fn new() -> io::Result<Self> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Self::current()
        })
    }

    /// A new namespace whose inode number is `inode`; none while somebody has that number.
    ///
    /// The kernel numbers namespaces of all kinds alike and takes the smallest number that is free (`proc_alloc_inum`,
    /// fs/proc/generic.c); a netns takes its own before some seventy of its files below `/proc/net` take theirs. UTS
    /// namespaces, which take one each, fill what is free below meanwhile.
    pub fn with_inode(inode: u64) -> io::Result<Option<Self>> {
        const UTS: &str = "/proc/thread-self/ns/uts";
        on_thread(|| {
            let own = File::open(UTS)?;
            let mut below = Vec::new();
            loop {
                unshare(CloneFlags::CLONE_NEWUTS)?;
                let uts = File::open(UTS)?;
                match nix::sys::stat::fstat(&uts)?.st_ino.cmp(&inode) {
                    Ordering::Less => below.push(uts),
                    Ordering::Equal => break,
                    Ordering::Greater => return Ok(None),
                }
            }
            // Its last user, this thread, leaves the UTS namespace that has the number, and a netns takes it.
            setns(&own, CloneFlags::CLONE_NEWUTS)?;
            unshare(CloneFlags::CLONE_NEWNET)?;
            let netns = Self::current()?;
            Ok((netns.inode() == inode).then_some(netns))
        })
    }

    /// The namespace of the calling thread.
    pub fn current() -> io::Result<Self> {
        Ok(Self::from_fd(File::open("/proc/thread-self/ns/net")?.into()))
    }

    /// The namespace behind a descriptor.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }

    /// Inode number on nsfs; unique only among namespaces that are alive.
    pub fn inode(&self) -> u64 {
        nix::sys::stat::fstat(&*self.0).map_or(0, |stat| stat.st_ino)
    }

    /// `SO_NETNS_COOKIE`: never re-used within a boot.
    pub fn cookie(&self) -> io::Result<u64> {
        let socket = self.run(|| std::net::UdpSocket::bind("0.0.0.0:0"))?;
        let mut cookie: u64 = 0;
        let mut len: libc::socklen_t = 8;
        // SAFETY: `cookie` and `len` live on this stack frame and `len` says how long `cookie` is.
        let rc = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_NETNS_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut len,
            )
        };
        if rc == 0 {
            Ok(cookie)
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Runs `f` inside, on a throwaway thread; a panic in `f` is passed on. See [`Place::run`].
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        Place::from(self).run(f)
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A mount namespace whose mounts nobody outside sees, and which the kernel takes down with its last user: a
/// killed test leaves nothing behind.
#[derive(Debug, Clone)]
pub struct MountNs(Arc<OwnedFd>);

impl MountNs {
    /// A private copy of others' mounts, with a `/proc` in which the caller's processes find themselves.
    fn copied(others: File) -> io::Result<Self> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_FS)?;
            setns(others, CloneFlags::CLONE_NEWNS)?;
            unshare_mounts()?;
            let none = None::<&str>;
            nix::mount::mount(Some("proc"), "/proc", Some("proc"), MsFlags::empty(), none)?;
            Self::current()
        })
    }

    /// A private copy of the calling thread's mounts.
    pub fn new() -> io::Result<Self> {
        on_thread(|| {
            unshare_mounts()?;
            Self::current()
        })
    }

    /// That of the calling thread.
    fn current() -> io::Result<Self> {
        Ok(Self(Arc::new(File::open("/proc/thread-self/ns/mnt")?.into())))
    }
}

/// Gives the calling thread a private copy of its mounts.
fn unshare_mounts() -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    nix::mount::mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
}

/// Where something runs: in which namespaces. Default: where the caller is.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Network namespace.
    pub net: Option<Netns>,
    /// Mount namespace.
    pub mount: Option<MountNs>,
}

impl From<&Netns> for Place {
    fn from(net: &Netns) -> Self {
        Self {
            net: Some(net.clone()),
            mount: None,
        }
    }
}

impl Place {
    /// Where a process runs: its network, and a private copy of its mounts as they are now.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        let open = |namespace: &str| File::open(format!("/proc/{pid}/ns/{namespace}"));
        Ok(Self {
            net: Some(Netns::from_fd(open("net")?.into())),
            mount: Some(MountNs::copied(open("mnt")?)?),
        })
    }

    /// Moves the calling thread inside, for good. Makes system calls only, so it may run between fork and exec.
    pub fn enter(&self) -> nix::Result<()> {
        if let Some(mount) = &self.mount {
            // setns(2): a thread that shares its root and working directory cannot change its mounts.
            unshare(CloneFlags::CLONE_FS)?;
            setns(&*mount.0, CloneFlags::CLONE_NEWNS)?;
        }
        if let Some(net) = &self.net {
            setns(&*net.0, CloneFlags::CLONE_NEWNET)?;
        }
        Ok(())
    }

    /// Runs `f` inside, on a throwaway thread, and waits for it. A panic in `f` is passed on.
    ///
    /// # Panics
    /// If the namespaces cannot be entered: what follows would touch the machine's own.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        on_thread(|| {
            self.enter_or_panic();
            f()
        })
    }

    /// Starts a thread named `name` inside; it stays inside until it ends.
    pub fn spawn<T: Send + 'static>(
        &self,
        name: &str,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let place = self.clone();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            place.enter_or_panic();
            drop(place); // a thread must not keep a namespace alive by descriptor beyond what it runs
            f()
        })
    }

    /// Makes a new netns inside this mount namespace, mounts it at `path`, and runs `f` inside it.
    pub(crate) fn new_netns_at<T: Send>(
        &self,
        path: &Path,
        f: impl FnOnce(&Netns) -> io::Result<T> + Send,
    ) -> io::Result<(Netns, T)> {
        on_thread(|| {
            self.enter_or_panic();
            unshare(CloneFlags::CLONE_NEWNET)?;
            mount_current_at(path)?;
            let netns = Netns::current()?;
            let made = f(&netns)?;
            Ok((netns, made))
        })
    }

    /// Mounts this place's netns at `path`, inside its mount namespace.
    pub(crate) fn mount_own_netns_at(&self, path: &Path) -> io::Result<()> {
        self.run(|| mount_current_at(path))
    }

    /// Takes the mount at `path` away and removes the file.
    pub(crate) fn unmount(&self, path: &Path) -> io::Result<()> {
        self.run(|| {
            nix::mount::umount2(path, MntFlags::MNT_DETACH)?;
            std::fs::remove_file(path)
        })
    }

    fn enter_or_panic(&self) {
        if let Err(errno) = self.enter() {
            panic!("cannot enter the namespaces (root is needed): {errno}");
        }
    }
}

/// Mounts the calling thread's netns at `path`.
fn mount_current_at(path: &Path) -> io::Result<()> {
    File::create(path)?;
    let none = None::<&str>;
    nix::mount::mount(
        Some("/proc/thread-self/ns/net"),
        path,
        none,
        MsFlags::MS_BIND,
        none,
    )?;
    Ok(())
}

fn on_thread<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(f).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

//! The few socket calls that no crate of ours wraps.
#![expect(
    unsafe_code,
    reason = "SIOCGSKNS, NS_GET_NSTYPE and three socket options have no safe wrapper"
)]

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `SO_NETNS_COOKIE` (asm-generic/socket.h, Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;
/// `SIOCGSKNS` (linux/sockios.h): a descriptor of the socket's network namespace. Needs CAP_NET_ADMIN.
const SIOCGSKNS: libc::c_ulong = 0x894C;
/// `NS_GET_NSTYPE` (linux/nsfs.h): `_IO(0xb7, 3)`.
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;

/// `AF_NETLINK` (bits/socket.h) in the width of an address family.
const AF_NETLINK: libc::sa_family_t = 16;
/// `RTMGRP_LINK` (linux/rtnetlink.h).
const RTMGRP_LINK: u32 = 1;

fn socket_option<T: Copy>(socket: impl AsFd, level: libc::c_int, option: libc::c_int) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the descriptor is open for the call, and the kernel writes at most `length` bytes to `value`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    if length as usize != size_of::<T>() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the kernel wrote all of it; the integers used here are valid for every bit pattern.
    Ok(unsafe { value.assume_init() })
}

/// Cookie of the namespace that the socket belongs to; never re-used within a boot.
pub(crate) fn netns_cookie(socket: impl AsFd) -> Result<u64, Errno> {
    socket_option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE)
}

/// `SO_DOMAIN` and `SO_PROTOCOL` (socket(7)).
pub(crate) fn family_and_protocol(socket: impl AsFd) -> Result<(i32, i32), Errno> {
    let socket = socket.as_fd();
    Ok((
        socket_option(socket, libc::SOL_SOCKET, libc::SO_DOMAIN)?,
        socket_option(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL)?,
    ))
}

/// Descriptor of the namespace that the socket belongs to.
pub(crate) fn netns_of_socket(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    // SAFETY: SIOCGSKNS takes no argument and returns a new descriptor or an error.
    let fd = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCGSKNS, 0) };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel just made this descriptor for us (close-on-exec, net/socket.c), nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Which kind of namespace a descriptor on nsfs is: a `CLONE_NEW*` constant.
pub(crate) fn namespace_type(descriptor: impl AsFd) -> Result<i32, Errno> {
    // SAFETY: NS_GET_NSTYPE takes no argument.
    Errno::result(unsafe { libc::ioctl(descriptor.as_fd().as_raw_fd(), NS_GET_NSTYPE, 0) })
}

/// Binds a route socket to the link group (`RTNLGRP_LINK`, linux/rtnetlink.h), non-blocking.
pub(crate) fn subscribe_to_links(socket: impl AsFd) -> Result<(), Errno> {
    let socket = socket.as_fd();
    let mut address = MaybeUninit::<libc::sockaddr_nl>::zeroed();
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_nl>()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: `address` is zeroed, which is a valid sockaddr_nl, and outlives the call.
    let result = unsafe {
        let raw = address.assume_init_mut();
        raw.nl_family = AF_NETLINK;
        raw.nl_groups = RTMGRP_LINK;
        libc::bind(socket.as_raw_fd(), address.as_ptr().cast(), length)
    };
    Errno::result(result)?;
    let flags = nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_GETFL)?;
    let flags = nix::fcntl::OFlag::from_bits_truncate(flags) | nix::fcntl::OFlag::O_NONBLOCK;
    nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_SETFL(flags))?;
    Ok(())
}

//! The few calls that no crate of ours wraps: the one place where this process speaks to a descriptor, or of its own
//! memory, directly.
#![expect(
    unsafe_code,
    reason = "SIOCGSKNS, NS_GET_NSTYPE, madvise and socket options that nix does not know have no safe wrapper"
)]

use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;

/// `SO_NETNS_COOKIE` (asm-generic/socket.h, Linux 5.14).
const SO_NETNS_COOKIE: libc::c_int = 71;
/// `SIOCGSKNS` (linux/sockios.h, Linux 4.9): a descriptor of the socket's network namespace. Needs CAP_NET_ADMIN.
const SIOCGSKNS: libc::c_ulong = 0x894C;
/// `NS_GET_NSTYPE` (linux/nsfs.h): `_IO(0xb7, 3)`.
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;

/// `AF_NETLINK` (bits/socket.h) in the width of an address family.
const AF_NETLINK: libc::sa_family_t = 16;
/// `RTMGRP_LINK` (linux/rtnetlink.h).
const RTMGRP_LINK: u32 = 1;

unsafe extern "C" {
    /// Where the program's image begins in memory; given by the linker (ld.bfd, lld).
    static __executable_start: u8;
    /// Where its code ends (end(3)).
    static etext: u8;
}

/// Gives back the pages of this program's code; those still in use return with their next use, from the page cache.
/// What runs only at start would otherwise count as a long-lived process's memory for ever.
pub(crate) fn give_back_code() {
    let (start, end) = (&raw const __executable_start, &raw const etext);
    let length = end.addr().saturating_sub(start.addr());
    // SAFETY: from the image's beginning to the end of code there are only pages of the file that nobody has written to
    // or can write to, so what is read there next is what was there before (madvise(2)). Failure changes nothing.
    unsafe { libc::madvise(start.cast_mut().cast(), length, libc::MADV_DONTNEED) };
}

/// Reads a socket option into `value`, which also tells what is asked for where the option wants that; returns how
/// much the kernel wrote.
pub(crate) fn read_option(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &mut [u8],
) -> Result<usize, Errno> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: `value` is valid for reads and writes of `length` bytes, and `length` for both, during the call.
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
    usize::try_from(length).map_err(|_| Errno::EINVAL)
}

/// An option of exactly `N` bytes.
fn fixed_option<const N: usize>(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
) -> Result<[u8; N], Errno> {
    let mut value = [0; N];
    match read_option(socket, level, option, &mut value)? {
        length if length == N => Ok(value),
        _ => Err(Errno::EINVAL),
    }
}

/// Writes a socket option. `value` must not hold addresses; where it must, see [`write_option_with_pointers`].
pub(crate) fn write_option(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &[u8],
) -> Result<(), Errno> {
    // SAFETY: the caller says that there are no addresses in `value`.
    unsafe { write_option_with_pointers(socket, level, option, value) }
}

/// Writes a socket option whose value holds addresses.
///
/// # Safety
///
/// Every address in `value` must be valid for what the kernel does with it under this option.
pub(crate) unsafe fn write_option_with_pointers(
    socket: impl AsFd,
    level: libc::c_int,
    option: libc::c_int,
    value: &[u8],
) -> Result<(), Errno> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: `value` is valid for reads of `length` bytes during the call; the rest is the caller's.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            option,
            value.as_ptr().cast(),
            length,
        )
    };
    Errno::result(result).map(drop)
}

/// An integer option of the socket level.
pub(crate) fn integer_option(socket: impl AsFd, option: libc::c_int) -> Result<i32, Errno> {
    fixed_option(socket, libc::SOL_SOCKET, option).map(i32::from_ne_bytes)
}

/// Switches a boolean socket option on.
pub(crate) fn enable(socket: impl AsFd, level: libc::c_int, option: libc::c_int) -> Result<(), Errno> {
    write_option(socket, level, option, &1_i32.to_ne_bytes())
}

/// Cookie of the namespace that the socket belongs to; never re-used within a boot.
pub(crate) fn netns_cookie(socket: impl AsFd) -> Result<u64, Errno> {
    fixed_option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE).map(u64::from_ne_bytes)
}

/// `SO_DOMAIN` and `SO_PROTOCOL` (socket(7)).
pub(crate) fn family_and_protocol(socket: impl AsFd) -> Result<(i32, i32), Errno> {
    let socket = socket.as_fd();
    Ok((
        integer_option(socket, libc::SO_DOMAIN)?,
        integer_option(socket, libc::SO_PROTOCOL)?,
    ))
}

/// Descriptor of the namespace that the socket belongs to. It holds the namespace alone, not a mount of it.
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

/// Has a route socket hear of changes of routes and of rules too, of both families (`RTNLGRP_*`, linux/rtnetlink.h).
pub(crate) fn subscribe_to_routing(socket: impl AsFd) -> Result<(), Errno> {
    for group in [
        libc::RTNLGRP_IPV4_ROUTE,
        libc::RTNLGRP_IPV4_RULE,
        libc::RTNLGRP_IPV6_ROUTE,
        libc::RTNLGRP_IPV6_RULE,
    ] {
        write_option(
            socket.as_fd(),
            libc::SOL_NETLINK,
            libc::NETLINK_ADD_MEMBERSHIP,
            &group.to_ne_bytes(),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn code_that_was_given_back_still_runs() {
        static CONSTANT: [u8; 4096] = [7; 4096];
        let before = CONSTANT.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        super::give_back_code();
        assert_eq!(CONSTANT.iter().map(|byte| u64::from(*byte)).sum::<u64>(), before);
    }
}

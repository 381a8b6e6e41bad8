//! Socket calls that neither std nor nix offers.
#![expect(
    unsafe_code,
    reason = "getsockopt, setsockopt and ioctl with constants nix does not know"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A socket option that is a plain integer of type `T`.
pub(super) fn socket_option<T: Integer>(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
) -> io::Result<T> {
    let mut value = T::default();
    let mut length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or_default();
    // SAFETY: value and length are valid for writes of the size that length says; T is a plain integer.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Switches a boolean socket option on.
pub(super) fn enable(fd: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of_val(&on)).unwrap_or_default();
    // SAFETY: `on` is valid for reads of `length` bytes during the call.
    let result = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, (&raw const on).cast(), length) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The network namespace a socket belongs to (`SIOCGSKNS`, Linux 4.9).
pub(super) fn netns_of(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: SIOCGSKNS takes no argument; it returns a new descriptor or -1.
    let raw = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGSKNS) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made this descriptor for us and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Integers for which every bit pattern is valid.
pub(super) trait Integer: Copy + Default {}
impl Integer for libc::c_int {}
impl Integer for u64 {}

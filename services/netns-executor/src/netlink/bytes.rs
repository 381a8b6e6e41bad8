//! Netlink messages as bytes: a writer, and a reader that never leaves its slice.
//!
//! Layout: `linux/netlink.h`. Headers are in host byte order; attributes of nf_tables hold big-endian integers, those of
//! rtnetlink host-order ones, so the writer has a method for each.

/// Length of `struct nlmsghdr`.
pub const HEADER: usize = 16;
/// Address family of IPv4, as messages have it (`linux/socket.h`).
pub const AF_INET: u8 = 2;
/// Address family of IPv6.
pub const AF_INET6: u8 = 10;
/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;
/// `NLA_TYPE_MASK`: without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const TYPE_MASK: u16 = 0x3fff;

/// Builds messages one after the other in one buffer.
#[derive(Debug, Clone, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// What was written so far.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Writes one message: header, the family's fixed header, attributes by `body`.
    pub fn message(
        &mut self,
        ty: u16,
        flags: u16,
        sequence: u32,
        fixed: &[u8],
        body: impl FnOnce(&mut Self),
    ) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&ty.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&sequence.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(fixed);
        self.pad();
        body(self);
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        self.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
    }

    /// An attribute.
    pub fn attribute(&mut self, ty: u16, value: &[u8]) {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&ty.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// A NUL-terminated string.
    pub fn string(&mut self, ty: u16, value: &str) {
        let mut bytes = Vec::with_capacity(value.len() + 1);
        bytes.extend_from_slice(value.as_bytes());
        bytes.push(0);
        self.attribute(ty, &bytes);
    }

    /// A big-endian 32-bit integer, as nf_tables wants it.
    pub fn be32(&mut self, ty: u16, value: u32) {
        self.attribute(ty, &value.to_be_bytes());
    }

    /// A host-order 32-bit integer, as rtnetlink wants it.
    pub fn ne32(&mut self, ty: u16, value: u32) {
        self.attribute(ty, &value.to_ne_bytes());
    }

    /// Attributes within an attribute.
    pub fn nest(&mut self, ty: u16, body: impl FnOnce(&mut Self)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0, 0]);
        self.bytes.extend_from_slice(&(ty | NESTED).to_ne_bytes());
        body(self);
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    }

    /// Bytes that were encoded before; must be whole attributes.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }
}

/// One received message.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// `nlmsg_type`.
    pub ty: u16,
    /// `nlmsg_flags`.
    pub flags: u16,
    /// `nlmsg_seq`.
    pub sequence: u32,
    /// What follows `struct nlmsghdr`.
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// The attributes behind the family's fixed header of `fixed` bytes.
    pub fn attributes(&self, fixed: usize) -> Attributes<'a> {
        Attributes(self.payload.get(fixed..).unwrap_or_default())
    }
}

/// Walks the messages of one datagram; ends at the first that does not fit.
#[derive(Debug, Clone)]
pub struct Messages<'a>(pub &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let length = u32_ne(self.0, 0)? as usize;
        let payload = self.0.get(HEADER..length)?;
        let message = Message {
            ty: u16_ne(self.0, 4)?,
            flags: u16_ne(self.0, 6)?,
            sequence: u32_ne(self.0, 8)?,
            payload,
        };
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    }
}

/// One attribute: its type without flags, and its value.
pub type Attribute<'a> = (u16, &'a [u8]);

/// Walks attributes; ends at the first that does not fit.
#[derive(Debug, Clone, Copy)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first attribute of this type.
    pub fn find(mut self, ty: u16) -> Option<&'a [u8]> {
        self.find_map(|(found, value)| (found == ty).then_some(value))
    }

    /// A big-endian 32-bit integer.
    pub fn be32(self, ty: u16) -> Option<u32> {
        Some(u32::from_be_bytes(self.find(ty)?.try_into().ok()?))
    }

    /// A big-endian 64-bit integer.
    pub fn be64(self, ty: u16) -> Option<u64> {
        Some(u64::from_be_bytes(self.find(ty)?.try_into().ok()?))
    }

    /// A host-order 32-bit integer.
    pub fn ne32(self, ty: u16) -> Option<u32> {
        u32_ne(self.find(ty)?, 0)
    }

    /// A string, up to its first NUL.
    pub fn string(self, ty: u16) -> Option<&'a str> {
        let bytes = self.find(ty)?;
        std::str::from_utf8(bytes.split(|byte| *byte == 0).next()?).ok()
    }

    /// The attributes within an attribute; none if it is absent.
    #[must_use]
    pub fn nested(self, ty: u16) -> Attributes<'a> {
        Attributes(self.find(ty).unwrap_or_default())
    }

    /// The next attribute with the `NLA_F_NESTED` flag as it was sent.
    fn advance(&mut self) -> Option<(bool, Attribute<'a>)> {
        let length = usize::from(u16_ne(self.0, 0)?);
        let ty = u16_ne(self.0, 2)?;
        let value = self.0.get(4..length)?;
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((ty & NESTED != 0, (ty & TYPE_MASK, value)))
    }
}

#[expect(
    clippy::copy_iterator,
    reason = "a slice to look things up in; looking up does not use it up"
)]
impl<'a> Iterator for Attributes<'a> {
    type Item = Attribute<'a>;

    fn next(&mut self) -> Option<Attribute<'a>> {
        self.advance().map(|(_, attribute)| attribute)
    }
}

/// Whether all that `asked` holds is in `found`, attribute by attribute.
///
/// A kernel may add attributes to what it was given (counter values, defaults) and leaves out the nested flag in what
/// it returns, so only `asked` says which attributes are compared and which of them hold others.
pub fn contains(found: Attributes<'_>, mut asked: Attributes<'_>) -> bool {
    while let Some((nested, (ty, value))) = asked.advance() {
        let Some(other) = found.find(ty) else { return false };
        let equal = if nested {
            contains(Attributes(other), Attributes(value))
        } else {
            other == value
        };
        if !equal {
            return false;
        }
    }
    true
}

fn u16_ne(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// A host-order 32-bit integer at an offset.
pub fn u32_ne(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_reads_back_as_written() {
        let mut writer = Writer::new();
        writer.message(7, 1, 42, &[1, 2, 3, 4], |w| {
            w.string(1, "abc");
            w.nest(2, |w| w.be32(1, 0x0102_0304));
        });
        let bytes = writer.into_bytes();
        let message = Messages(&bytes).next().unwrap();
        assert_eq!((message.ty, message.flags, message.sequence), (7, 1, 42));
        assert_eq!(message.attributes(4).string(1), Some("abc"));
        assert_eq!(message.attributes(4).nested(2).be32(1), Some(0x0102_0304));
        assert_eq!(Messages(&bytes).count(), 1);
    }

    #[test]
    fn every_cut_of_a_datagram_is_read_without_panic() {
        let mut writer = Writer::new();
        writer.message(7, 1, 42, &[0; 4], |w| w.nest(2, |w| w.string(1, "abcdefg")));
        let bytes = writer.into_bytes();
        for cut in 0..bytes.len() {
            for message in Messages(&bytes[..cut]) {
                let _ = message.attributes(4).nested(2).string(1);
            }
        }
        for length in [0u16, 1, 3, 4, 0xffff] {
            let _ = Attributes(&length.to_ne_bytes().repeat(3)).count();
        }
    }

    #[test]
    fn additional_attributes_are_no_difference_and_missing_ones_are() {
        let tree = |extra: bool, value: u32| {
            let mut writer = Writer::new();
            writer.nest(1, |w| {
                w.be32(2, value);
                if extra {
                    w.be32(3, 9);
                }
            });
            writer.into_bytes()
        };
        let (asked, more, other) = (tree(false, 1), tree(true, 1), tree(false, 2));
        assert!(contains(Attributes(&more), Attributes(&asked)));
        assert!(!contains(Attributes(&asked), Attributes(&more)));
        assert!(!contains(Attributes(&other), Attributes(&asked)));
    }
}

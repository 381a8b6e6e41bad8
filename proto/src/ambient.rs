//! Typed options of the ambient rule set, and what a sandbox's namespace should look like.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::id::{InterfaceName, InvalidId};
use crate::pb::types;

/// Source address of the host's probes as pods see it, IPv4 (Istio's `HOST_PROBE_SNAT_IP`).
pub const PROBE_IPV4: Ipv4Addr = Ipv4Addr::new(169, 254, 7, 127);
/// Source address of the host's probes as pods see it, IPv6 (Istio's `HOST_PROBE_SNAT_IPV6`).
pub const PROBE_IPV6: Ipv6Addr =
    Ipv6Addr::new(0xfd16, 0x9254, 0x7127, 0x1337, 0xffff, 0xffff, 0xffff, 0xffff);

/// Options of the ambient rule set. At most 16 virtual interfaces.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmbientOptions {
    /// Redirect DNS (TCP and UDP port 53) to the proxy.
    pub dns_capture: bool,
    /// Leave inbound plaintext alone (`ambient.istio.io/bypass-inbound-capture`).
    pub bypass_inbound_capture: bool,
    /// TCP arriving on these interfaces counts as outbound (`istio.io/reroute-virtual-interfaces`).
    pub virtual_interfaces: Vec<InterfaceName>,
    /// Redirect IPv6 too.
    pub ipv6: bool,
    /// Source address of the host's probes, IPv4.
    pub probe_ipv4: Ipv4Addr,
    /// Source address of the host's probes, IPv6.
    pub probe_ipv6: Ipv6Addr,
}

impl Default for AmbientOptions {
    fn default() -> Self {
        Self {
            dns_capture: true,
            bypass_inbound_capture: false,
            virtual_interfaces: Vec::new(),
            ipv6: true,
            probe_ipv4: PROBE_IPV4,
            probe_ipv6: PROBE_IPV6,
        }
    }
}

/// What a sandbox's namespace should look like.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Desired {
    /// Nothing of ours.
    None,
    /// Redirected to the node's proxy.
    Ambient(AmbientOptions),
    /// As [`Self::Ambient`], but of TCP only what opens a connection is redirected. The executor's own step on the way
    /// of a running pod into the mesh, while it makes the connections known that are there; told to peers as AMBIENT.
    Joining(AmbientOptions),
    /// Leaving: no new connection is redirected, kept ones are still translated. Chains, mark rules and
    /// routes stay, because conntrack's translation needs a nat base chain and a rule that uses conntrack.
    Draining(AmbientOptions),
}

/// A `Desired` that a peer sent and that means nothing.
#[derive(Debug, thiserror::Error)]
pub enum InvalidDesired {
    /// The mode is unset, unknown or not implemented here.
    #[error("mode {0} is not one of NONE, AMBIENT, DRAINING")]
    Mode(i32),
    /// The mode needs options.
    #[error("ambient options are missing")]
    OptionsMissing,
    /// More virtual interfaces than anybody has.
    #[error("{0} virtual interfaces; at most 16 are allowed")]
    TooManyInterfaces(usize),
    /// Not an address.
    #[error("{field} {value:?} is not an address of its family")]
    Address {
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: String,
    },
    /// Not an interface name.
    #[error(transparent)]
    Interface(#[from] InvalidId),
}

impl TryFrom<types::AmbientOptions> for AmbientOptions {
    type Error = InvalidDesired;

    fn try_from(pb: types::AmbientOptions) -> Result<Self, InvalidDesired> {
        if pb.virtual_interfaces.len() > 16 {
            return Err(InvalidDesired::TooManyInterfaces(pb.virtual_interfaces.len()));
        }
        Ok(Self {
            dns_capture: pb.dns_capture,
            bypass_inbound_capture: pb.bypass_inbound_capture,
            virtual_interfaces: pb
                .virtual_interfaces
                .into_iter()
                .map(InterfaceName::parse)
                .collect::<Result<_, _>>()?,
            ipv6: pb.ipv6,
            probe_ipv4: pb.probe_ipv4.parse().map_err(|_| InvalidDesired::Address {
                field: "probe_ipv4",
                value: pb.probe_ipv4.clone(),
            })?,
            probe_ipv6: pb.probe_ipv6.parse().map_err(|_| InvalidDesired::Address {
                field: "probe_ipv6",
                value: pb.probe_ipv6.clone(),
            })?,
        })
    }
}

impl From<&AmbientOptions> for types::AmbientOptions {
    fn from(options: &AmbientOptions) -> Self {
        Self {
            dns_capture: options.dns_capture,
            bypass_inbound_capture: options.bypass_inbound_capture,
            virtual_interfaces: options
                .virtual_interfaces
                .iter()
                .map(ToString::to_string)
                .collect(),
            ipv6: options.ipv6,
            probe_ipv4: options.probe_ipv4.to_string(),
            probe_ipv6: options.probe_ipv6.to_string(),
        }
    }
}

impl TryFrom<types::Desired> for Desired {
    type Error = InvalidDesired;

    fn try_from(pb: types::Desired) -> Result<Self, InvalidDesired> {
        let options = || {
            pb.ambient
                .clone()
                .ok_or(InvalidDesired::OptionsMissing)?
                .try_into()
        };
        match pb.mode() {
            types::Mode::None => Ok(Self::None),
            types::Mode::Ambient => Ok(Self::Ambient(options()?)),
            types::Mode::Draining => Ok(Self::Draining(options()?)),
            types::Mode::Unspecified | types::Mode::Sidecar => Err(InvalidDesired::Mode(pb.mode)),
        }
    }
}

impl From<&Desired> for types::Desired {
    fn from(desired: &Desired) -> Self {
        let (mode, ambient) = match desired {
            Desired::None => (types::Mode::None, None),
            Desired::Ambient(options) | Desired::Joining(options) => {
                (types::Mode::Ambient, Some(options.into()))
            }
            Desired::Draining(options) => (types::Mode::Draining, Some(options.into())),
        };
        Self {
            mode: mode.into(),
            ambient,
        }
    }
}

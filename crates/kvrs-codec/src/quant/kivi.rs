//! KIVI (Liu et al., 2024, arXiv:2402.02750): keys per channel and group of tokens, values per token and group of
//! channels, between minimum and maximum.
//!
//! Where we differ from the paper: any width from 1 to 8 bits, groups of 16, 32 or 64, and the window is the plan's.
//! Codes stand for `code * step + minimum`; kernels centre the codes themselves. A last group of channels may be short.

use super::parts::{Parts, integers};
use super::{ConstantCache, Entry, Parameter, Settings, SideBuild, SideContext};
use crate::desc::{Inner, Side};
use crate::encode::MinMaxEncoder;
use kvrs_core::Result;

pub(super) const ENTRY: Entry = Entry {
    name: "kivi",
    paper: "Liu et al., 2024, arXiv:2402.02750",
    parameters: &[
        Parameter { name: "bits", allowed: "an integer in 1..=8", default: None },
        Parameter { name: "group", allowed: "16, 32, 64", default: Some("32") },
    ],
    check: |settings| parse(settings).map(drop),
    build,
};

/// Bits and group.
fn parse(settings: &Settings<'_>) -> Result<(u32, u32)> {
    let bits = settings.number_in("bits", super::is_width)?;
    let group = match settings.get("group") {
        None => 32.0,
        Some(_) => settings.number_in("group", |group| [16.0, 32.0, 64.0].contains(&group))?,
    };
    Ok((bits as u32, group as u32))
}

fn build(settings: &Settings<'_>, context: &SideContext<'_>, cache: &mut ConstantCache) -> Result<SideBuild> {
    let (width, block) = parse(settings)?;
    let parts = Parts::plain(context.d, integers(width), MinMaxEncoder { width });
    let mut side = parts.build(context, cache)?;
    side.desc.block = block;
    side.desc.inner = Inner::TokenBlock;
    if context.side == Side::Key {
        (side.desc.inner, side.group) = (Inner::GroupChannel, block);
    }
    Ok(side)
}

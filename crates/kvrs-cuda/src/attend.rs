//! An attention call: codecs, constants and results, wave by wave.

use crate::args;
use crate::backend::Cuda;
use crate::codec::DeviceCodec;
use crate::launcher::Launcher;
use crate::memory::{Chunk, Parcel};
use crate::pass::{Fixed, Pass};
use crate::units::Shape;
use crate::workspace::{Workspace, view, view_mut};
use kvrs_codec::ViewMut;
use kvrs_codec::backend::{AttendCall, Results};
use kvrs_core::Result;
use std::sync::Arc;

/// Attends; of the results that live on the host, fills them before it returns.
pub(crate) fn attend<L: Launcher>(
    cuda: &Cuda<L>,
    call: &AttendCall<'_, Chunk<L>>,
    results: Results<'_, '_>,
) -> Result<()> {
    let Results { out, lse, received, value_tiles } = results;
    cuda.stream.start()?;
    let mut workspace = cuda.workspace()?;
    let asked = received.as_ref().map(|received| (received.reduce, received.fold));
    let codecs = codecs(cuda, call)?;
    let records = asked.is_some() || call.top_k.is_some();
    let shape = Shape::new(call, records, &codecs, cuda.stream.launcher.processors());
    let tiles = value_tiles.filter(|_| call.top_k.is_some());
    let lse_len = if lse.is_some() || asked.is_some() { lse_len(call) } else { 0 };
    let fixed = fix(cuda, call, &codecs, &mut workspace, out, (lse_len, tiles.is_some()))?;
    let pass = Pass { cuda, call, shape, fixed, asked };
    pass.clear_padding(&mut workspace)?;
    let mut sums = received.map(|received| received.sums);
    let most = call.rows.iter().map(|row| row.columns.len()).max().unwrap_or(0);
    let step = pass.shape.wave(&call.rows);
    for first in (0..most).step_by(step) {
        pass.wave(first..most.min(first + step), &mut workspace, sums.as_deref_mut())?;
    }
    if let Some(lse) = lse {
        cuda.stream.download(fixed.lse, lse)?;
    }
    if let Some(tiles) = tiles {
        let mut counts = [0u64; 2];
        cuda.stream.download(fixed.tiles, &mut counts)?;
        tiles.count(counts[0], counts[1]);
    }
    Ok(())
}

fn lse_len<C>(call: &AttendCall<'_, C>) -> usize {
    let [rows, heads, columns, _] = call.q.shape();
    rows * heads * columns
}

/// The codecs of a call in device memory, `[head group][class]`; `None` where a group has fewer classes.
fn codecs<L: Launcher>(
    cuda: &Cuda<L>,
    call: &AttendCall<'_, Chunk<L>>,
) -> Result<Vec<Option<Arc<DeviceCodec<L>>>>> {
    let classes = call.layer.classes.iter().map(Vec::len).max().unwrap_or(1);
    let all = call.layer.classes.iter().flat_map(|group| (0..classes).map(|class| group.get(class)));
    all.map(|codec| codec.map(|codec| cuda.codecs.get(&cuda.stream.launcher, codec)).transpose()).collect()
}

/// Brings addresses of codecs and sink logits to the device and takes the memory that all waves share.
fn fix<L: Launcher>(
    cuda: &Cuda<L>,
    call: &AttendCall<'_, Chunk<L>>,
    codecs: &[Option<Arc<DeviceCodec<L>>>],
    workspace: &mut Workspace<L>,
    out: Option<&mut ViewMut<'_>>,
    (lse_len, count_tiles): (usize, bool),
) -> Result<Fixed> {
    let sides: Vec<u64> =
        codecs.iter().flat_map(|codec| codec.as_ref().map_or([0; 2], |codec| codec.side)).collect();
    let mut parcel = Parcel::default();
    let (sides, sinks) = (parcel.add(&sides), call.sink_logits.map(|sinks| parcel.add(sinks)));
    let base = parcel.send(&cuda.stream.launcher, &mut workspace.constants)?;
    let lse = if lse_len > 0 { workspace.lse.of(&cuda.stream.launcher, 4 * lse_len)? } else { 0 };
    let mut tiles = 0;
    if count_tiles {
        let counts = workspace.tiles.hold(&cuda.stream.launcher, 16)?;
        counts.fill(&[0; 16])?;
        tiles = counts.address;
    }
    let values = out.is_some();
    let out = out.map_or_else(args::View::default, view_mut);
    let own = call.own.as_ref().map_or_else(Default::default, |(k, v)| [view(k), view(v)]);
    let (sides, sinks) = (sides.at(base), sinks.map_or(0, |sinks| sinks.at(base)));
    Ok(Fixed { sides, sinks, lse, out, values, own, tiles })
}
